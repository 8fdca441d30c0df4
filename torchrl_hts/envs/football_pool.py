"""Games of EnvPool: one in this process, one in a process of its own, several in one pool.

EnvPool takes a seed only when a pool is made, and the memory of a game is lost when the pool is
deleted (about 45 MB each, envpool 1.2.5). Whoever begins anew with a seed again and again, as
evaluations do, needs `PoolProcess`. Whoever does so once takes `Pool`, which is a little faster. An
executor takes a `SharedPool` of its games, which is faster still.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NoReturn

import numpy as np

from torchrl_hts._processes.linux import die_with_parent
from torchrl_hts._processes.uncopied import Uncopied

__all__ = ["Pool", "PoolProcess", "SharedGame", "SharedPool"]

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
        self._pool = _make(scenario, [seed])

    def reset(self) -> Shown:
        """Begin the next episode."""
        return _shown(*self._pool.reset())

    def step(self, action: int) -> Shown:
        """One step."""
        observation, _, _, _, info = self._pool.step(np.array([action], np.int32))
        return _shown(observation, info)

    def close(self) -> None:
        """Let go of it."""
        self._pool = None


def _make(scenario: str, seeds: list[int]) -> Any:
    """A pool of games, whose one thread plays them in the order in which it is asked to."""
    import envpool

    sizes = {"num_envs": len(seeds), "batch_size": 1, "num_threads": 1}
    return envpool.make(f"gfootball/{scenario}-v1", env_type="gymnasium", seed=seeds, **sizes)


def _shown(observation: Array, info: dict[str, Any]) -> Shown:
    numbers: dict[str, Any] = {name: int(info[name][0]) for name in _NUMBERS}
    numbers["score"] = tuple(int(goals) for goals in info["score"][0])
    return np.ascontiguousarray(observation[0].transpose(2, 0, 1)), numbers


class SharedPool:
    """Several games of this process in one pool, whose thread plays on while others are looked at.

    Games join until the first of them is reset; then the pool is made, with the seeds of all.

    Args:
        scenario: name of the scenario.
    """

    _gathering: ClassVar[dict[str, SharedPool]] = {}

    def __init__(self, scenario: str) -> None:
        self._scenario = scenario
        self._seeds: list[int] = []
        self._pool: Any = None
        self._arrived: dict[int, Shown] = {}

    @classmethod
    def join(cls, scenario: str, seed: int) -> SharedGame:
        """A game in the pool that is being gathered.

        Args:
            scenario: name of the scenario.
            seed: from 0 to 2**31 - 1.
        """
        pool = cls._gathering.setdefault(scenario, cls(scenario))
        pool._seeds.append(seed)
        return SharedGame(pool, len(pool._seeds) - 1, seed)

    def start(self) -> None:
        """Begin the first episodes of all games, if they haven't begun."""
        if self._pool is None:
            self._gathering.pop(self._scenario, None)
            self._pool = _make(self._scenario, self._seeds)
            self._pool.async_reset()

    def begin_reset(self, game: int) -> None:
        """Begin the next episode of a game."""
        self._pool._reset(np.array([game], np.int32))  # reset would wait for whatever comes

    def begin_step(self, game: int, action: int) -> None:
        """Begin a step of a game."""
        self._pool.send(np.array([action], np.int32), np.array([game], np.int32))

    def wait(self, game: int) -> Shown:
        """What came of what a game has begun."""
        while game not in self._arrived:
            observation, _, _, _, info = self._pool.recv()
            self._arrived[int(info["env_id"][0])] = _shown(observation, info)
        return self._arrived.pop(game)


class SharedGame:
    """A game of a `SharedPool`.

    Args:
        pool: which plays it.
        index: its place there.
        seed: of the game.
    """

    def __init__(self, pool: SharedPool, index: int, seed: int) -> None:
        self._pool: SharedPool | None = pool
        self._index = index
        self.seed = seed
        self._has_started = self._has_begun = False

    def reset(self) -> Shown:
        """Begin the next episode."""
        assert self._pool is not None
        if self._has_begun:
            raise RuntimeError("a step of this game has begun: call step before reset")
        if self._has_started:
            self._pool.begin_reset(self._index)
        else:
            self._pool.start()
            self._has_started = True
        return self._pool.wait(self._index)

    def begin_step(self, action: int) -> bool:
        """Begin the step that comes next."""
        assert self._pool is not None
        self._pool.begin_step(self._index, action)
        self._has_begun = True
        return True

    def step(self, action: int) -> Shown:
        """One step, or the rest of the one that has begun."""
        if not self._has_begun:
            self.begin_step(action)
        self._has_begun = False
        assert self._pool is not None
        return self._pool.wait(self._index)

    def close(self) -> None:
        """Let go of it; the others play on."""
        self._pool = None


class PoolProcess(Uncopied):
    """The same in a process of its own, which dies with this one.

    Args:
        scenario: name of the scenario.
        seed: from 0 to 2**31 - 1.
    """

    _pid: int | None = None
    _why_uncopied = "the process that plays the game has one owner; make another"

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
