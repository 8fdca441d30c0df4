"""Environments that wait, in threads of one executor: while one waits, the others go on.

An environment is made in a thread of its own, and all of its methods are called there. To its
executor it is a `BackgroundEnv`. Only one thread runs Python at a time, so this is for steps that
wait: for a server, a robot, a subprocess.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from torchrl_hts._executor.generators import begin_in_thread, draws_are_seen, end_in_thread
from torchrl_hts._executor.gym_env import BackgroundEnv
from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts._processes.raised import exits_well
from torchrl_hts.env_state import names_of, restore_environment, save_environment
from torchrl_hts.env_state.names import Names
from torchrl_hts.envs.simulator import has_ended

__all__ = ["ThreadEnv", "make_in_thread"]

_CLOSE_S = 30.0


@dataclass(frozen=True)
class _Outcome:
    """What a method returned, or what it raised."""

    value: Any = None
    error: BaseException | None = None

    @classmethod
    def of(cls, method: Callable[[], Any]) -> _Outcome:
        try:
            return cls(method())
        except BaseException as error:
            return cls(error=error)

    def get(self) -> Any:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


class _Thread:
    """A thread that calls what it is given, one after the other."""

    def __init__(self) -> None:
        # What is to be called, and whether anybody asks for the outcome; None ends the thread.
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], bool] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._end = weakref.finalize(self, self._calls.put, None)
        args = self._calls, self._outcomes
        threading.Thread(target=_run, args=args, name="environment", daemon=True).start()

    def begin(self, call: Callable[[], Any]) -> None:
        """Call it, once everything before it has been called."""
        self._calls.put((call, True))

    def tell(self, call: Callable[[], None]) -> None:
        """The same for a call whose outcome nobody asks for."""
        self._calls.put((call, False))

    def outcome(self, timeout_s: float | None = None) -> Any:
        """What came of the oldest call that has begun and whose outcome wasn't asked for.

        Raises:
            queue.Empty: after the time-out.
        """
        return self._outcomes.get(timeout=timeout_s).get()

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a method returns or raises."""
        self.begin(partial(method, *args, **kwargs))
        return self.outcome()

    def end(self) -> None:
        """End the thread, once everything has been called."""
        self._end()


def _run(calls: queue.SimpleQueue[Any], outcomes: queue.SimpleQueue[_Outcome]) -> None:
    pid = os.getpid()
    for call, is_asked_for in iter(calls.get, None):
        outcome = _Outcome.of(call)
        if os.getpid() != pid:  # a fork that an environment has made, and that was to end
            os._exit(0 if outcome.error is None or exits_well(outcome.error) else 1)
        if is_asked_for:
            outcomes.put(outcome)
        del call, outcome  # not to be held until the next call


class _Closed:
    """In the place of the thread of an environment that has been closed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise gym.error.ClosedEnvironmentError(
            "an environment of make_in_thread has been closed, and its thread has ended: make a "
            "new one"
        )


class ThreadEnv(BackgroundEnv):
    """An environment in a thread of its own; made by `make_in_thread`.

    Args:
        factory: makes it.
    """

    tells = True

    def __init__(self, factory: Callable[[], gym.Env[Any, Any]]) -> None:
        self._thread: Any = _Thread()
        try:
            self._env = self.held = _checked(self._thread.call(factory))
        except BaseException:
            self._thread.end()
            raise
        own_spaces(self._env)
        self._names: Names | None = None
        with contextlib.suppress(Exception):  # which is met again, and told, where it is saved
            self._names = names_of(self._env)
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        self.metadata = self._env.metadata
        self.render_mode = self._env.render_mode
        self._has_begun = False  # what comes next
        self._next: _Outcome | None = None  # the episode that follows, if it has begun

    @property  # type: ignore[misc]  # nothing may be set
    def np_random(self) -> np.random.Generator:
        """The environment's own."""
        return self._env.np_random

    def begin_reset(self, seed: int) -> None:
        """See `BackgroundEnv`."""
        self._begin(partial(self._reset, seed))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """What the environment's ``reset`` does, or the rest of one that has begun."""
        following, self._next = self._next, None
        if self._has_begun:
            return self._finish()
        if following is not None and seed is None and options is None:
            return following.get()
        return self._thread.call(self._reset, seed, options)

    def begin_step(self, action: Any) -> bool:
        """See `BackgroundEnv`."""
        return self._begin(partial(self._step, action))

    def tell_when_over(self, tell: Callable[[], None]) -> None:
        """See `BackgroundEnv`."""
        self._thread.tell(tell)

    def step(self, action: Any) -> Any:
        """What the environment's ``step`` does, or the rest of one that has begun."""
        if not self._has_begun:
            return self._thread.call(self._env.step, action)
        outcome, self._next = self._finish()
        return outcome

    def render(self) -> Any:
        """What the environment's ``render`` does."""
        return self._thread.call(self._env.render)

    def get_state(self) -> bytes:
        """All that its future depends on.

        Raises:
            CannotSaveError: if the environment holds something that can't be saved.
        """
        state: bytes = self._thread.call(save_environment, self._env, names=self._names)
        return state

    def set_state(self, state: bytes) -> None:
        """Go on where `get_state` was called, in another process maybe."""
        self._next = None
        self._thread.call(restore_environment, self._env, state, names=self._names)

    def close(self) -> None:
        """Close the environment and end its thread.

        Raises:
            TimeoutError: the environment doesn't close. Its thread ends with the process.
        """
        thread, self._thread = self._thread, _Closed()
        if isinstance(thread, _Closed):
            return
        thread.begin(self._env.close)
        thread.end()
        try:
            if self._has_begun:
                with contextlib.suppress(Exception):  # of a step that nobody asks for any more
                    thread.outcome(_CLOSE_S)
            thread.outcome(_CLOSE_S)
        except queue.Empty:
            raise TimeoutError(
                f"an environment of make_in_thread was not closed within {_CLOSE_S:g} s, for it "
                "hangs in its close, or still in what it was asked for before"
            ) from None

    def _begin(self, call: Callable[[], Any]) -> bool:
        """Begin it, unless draws would be lost to other environments unseen."""
        if draws_are_seen():
            begin_in_thread()
            self._has_begun = True
            self._thread.begin(call)
        return self._has_begun

    def _finish(self) -> Any:
        self._has_begun = False
        try:
            return self._thread.outcome()
        finally:
            end_in_thread()

    def _reset(self, seed: int | None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            seed_spaces(self._env, seed)
        given = {} if options is None else {"options": options}  # which not every reset takes
        return self._env.reset(seed=seed, **given)

    def _step(self, action: Any) -> tuple[Any, _Outcome | None]:
        """What comes of a step, and the episode that follows on its end."""
        outcome = self._env.step(action)
        if not has_ended(outcome):
            return outcome, None
        # Environments may write the first observation where the last one is.
        observation, reward, terminated, truncated, info = outcome
        kept = copy.deepcopy(observation), reward, terminated, truncated, _with_own_arrays(info)
        return kept, _Outcome.of(partial(self._env.reset, seed=None))


def _with_own_arrays(info: Any) -> Any:
    if isinstance(info, dict):
        return {key: _with_own_arrays(value) for key, value in info.items()}
    return info.copy() if isinstance(info, np.ndarray) else info


def _checked(env: Any) -> gym.Env[Any, Any]:
    if isinstance(env, gym.vector.VectorEnv) or not isinstance(env, gym.Env):
        raise TypeError(
            f"make_in_thread's factory made a {type(env).__module__}.{type(env).__qualname__}; "
            "expected one gymnasium.Env"
        )
    return env


def make_in_thread(factory: Callable[[], gym.Env[Any, Any]]) -> ThreadEnv:
    """Makes an environment whose steps wait, in a thread of its own; never imports torch.

    An executor has many such environments. While one waits, for a server or a robot, the others go
    on; without ``num_executors`` one executor has as many as it can serve. The environment is made
    in its thread, and all of its methods are called there.

    It gives the same bits as ``factory()`` would, if it draws from its ``np_random`` and its spaces
    alone. Threads share what a process has one of: ``random``, ``np.random`` and torch's default
    generator. A step that draws from them is an error.

    Args:
        factory: makes one gymnasium environment. Whatever is to be around it belongs in there.

    Raises:
        TypeError: the factory can't be called, or makes anything else.
        RuntimeError: from an executor, if one of its environments has drawn from what they share.

    Example::

        collector = HTSCollector([partial(make_in_thread, make_robot)] * 64, policy, ...)
    """
    if not callable(factory):
        raise TypeError(
            "make_in_thread takes a factory, which makes one gymnasium environment when it is "
            f"called without arguments; got {factory!r}. Give a function, or "
            "functools.partial(make, ...)"
        )
    return ThreadEnv(factory)
