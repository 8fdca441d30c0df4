"""One game of EnvPool, in this process or in one of its own.

EnvPool takes a seed only when a pool is made, and the memory of a game is lost when the pool is
deleted (about 45 MB each, envpool 1.2.5). Whoever begins anew with a seed again and again, as
evaluations do, needs `PoolProcess`; whoever does so once takes `Pool`, which is a little faster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np

from torchrl_hts.system import die_with_parent

__all__ = ["Pool", "PoolProcess"]

Array = np.ndarray[Any, Any]
Shown = tuple[Array, dict[str, Any]]  # the minimap, uint8 [4, 72, 96], and the numbers beside it

_NUMBERS = ("game_mode", "ball_owned_team", "steps_left", "engine_seed", "episode_number")


class Pool:
    """A pool of one environment in this process.

    Args:
        scenario: name of the scenario.
        seed: from 0 to 2**31 - 1.
    """

    def __init__(self, scenario: str, seed: int) -> None:
        import envpool

        self._pool: Any = envpool.make(
            f"gfootball/{scenario}-v1", env_type="gymnasium", num_envs=1, num_threads=1, seed=seed
        )

    def reset(self) -> Shown:
        """Begin the next episode."""
        return self._shown(*self._pool.reset())

    def step(self, action: int) -> Shown:
        """One step."""
        observation, _, _, _, info = self._pool.step(np.array([action], np.int32))
        return self._shown(observation, info)

    def _shown(self, observation: Array, info: dict[str, Any]) -> Shown:
        numbers: dict[str, Any] = {name: int(info[name][0]) for name in _NUMBERS}
        numbers["score"] = tuple(int(goals) for goals in info["score"][0])
        return np.ascontiguousarray(observation[0].transpose(2, 0, 1)), numbers

    def close(self) -> None:
        """Let go of it."""
        self._pool = None


class PoolProcess:
    """The same in a process of its own, which dies with this one.

    Args:
        scenario: name of the scenario.
        seed: from 0 to 2**31 - 1.
    """

    _pid: int | None = None

    def __init__(self, scenario: str, seed: int) -> None:
        self._control, control = Pipe()
        self._parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _run(scenario, seed, control, self._parent)
        control.close()

    def reset(self) -> Shown:
        """Begin the next episode."""
        return self._ask(None)

    def step(self, action: int) -> Shown:
        """One step."""
        return self._ask(action)

    def _ask(self, action: int | None) -> Shown:
        try:
            self._control.send(action)
            answer: Shown | str = self._control.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise RuntimeError(
                "the process of an EnvPool football game died; was it out of memory?"
            ) from None
        if isinstance(answer, str):
            raise RuntimeError(f"EnvPool failed:\n\n{answer}")
        return answer

    def close(self) -> None:
        """End it."""
        if self._pid is not None and os.getpid() == self._parent:  # not a fork of it
            self._control.close()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody reaped it
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = None

    def __del__(self) -> None:
        self.close()


def _run(scenario: str, seed: int, control: Connection, parent: int) -> NoReturn:
    """What the process does: answer until it is killed, or nobody asks any more."""
    try:
        _keep_apart(control.fileno(), parent)
        try:
            pool = Pool(scenario, seed)
            while True:
                action = control.recv()
                control.send(pool.reset() if action is None else pool.step(action))
        except EOFError:
            pass
        except BaseException:
            control.send(traceback.format_exc())
    finally:
        os._exit(0)


def _keep_apart(own_fd: int, parent: int) -> None:
    """Die with the parent, and hold none of its files open: their readers wait for their end."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent says when
    die_with_parent(parent)
    os.closerange(3, own_fd)
    os.closerange(own_fd + 1, os.sysconf("SC_OPEN_MAX"))
