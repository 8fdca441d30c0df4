"""Environments that wait, in threads of one executor: while one waits, the others go on.

An environment is made in a thread of its own, and all of its methods are called there. To its
executor it is a `BackgroundEnv`. Only one thread runs Python at a time, so this is for steps that
wait: for a server, a robot, a subprocess.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NoReturn, TypeAlias

import gymnasium as gym
import numpy as np

from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts._executor.generators import draws_are_seen, threads
from torchrl_hts._processes.raised import exits_well
from torchrl_hts.env_state import names_of, restore_environment, save_environment
from torchrl_hts.env_state.names import Names

__all__ = ["ThreadEnv", "make_in_thread"]

_Call: TypeAlias = tuple["Future[Any]", Callable[[], Any]]  # what comes of it, and a method

_CLOSE_S = 30.0


class _Thread:
    """A thread that calls methods, one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()  # None ends the thread
        self._end = weakref.finalize(self, self._calls.put, None)
        threading.Thread(target=_run, args=[self._calls], name="environment", daemon=True).start()

    def begin(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method, once everything before it has been called."""
        outcome: Future[Any] = Future()
        self._calls.put((outcome, partial(method, *args, **kwargs)))
        return outcome

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a method returns or raises."""
        return self.begin(method, *args, **kwargs).result()

    def end(self) -> None:
        """End the thread, once everything has been called."""
        self._end()


def _run(calls: queue.SimpleQueue[_Call | None]) -> None:
    pid = os.getpid()
    for outcome, method in iter(calls.get, None):
        value = error = None
        try:
            value = method()
        except BaseException as raised:
            error = raised
        if os.getpid() != pid:  # a fork that an environment has made, and that was to end
            os._exit(0 if error is None or exits_well(error) else 1)
        if error is None:
            outcome.set_result(value)
        else:
            outcome.set_exception(error)
        del outcome, method, value, error  # not to be held until the next call


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
    begins_episodes = True

    def __init__(self, factory: Callable[[], gym.Env[Any, Any]]) -> None:
        self._thread: Any = _Thread()
        try:
            self._env = self.held = _checked(self._thread.call(factory))
        except BaseException:
            self._thread.end()
            raise
        self._names: Names | None = None
        with contextlib.suppress(Exception):  # which is met again, and told, where it is saved
            self._names = names_of(self._env)
        self._begun: Future[Any] | None = None  # what comes next
        self._closing: Future[Any] | None = None
        self._closed_by = 0.0  # by time.monotonic(), else it hangs

    @property
    def observation_space(self) -> gym.Space[Any]:  # type: ignore[override]  # nothing may be set
        """The environment's own."""
        return self._env.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:  # type: ignore[override]
        """The environment's own."""
        return self._env.action_space

    @property
    def metadata(self) -> dict[str, Any]:  # type: ignore[override]
        """The environment's own."""
        return self._env.metadata

    @property
    def render_mode(self) -> str | None:  # type: ignore[override]
        """The environment's own."""
        return self._env.render_mode

    @property  # type: ignore[misc]
    def np_random(self) -> np.random.Generator:
        """The environment's own."""
        return self._env.np_random

    def begin_reset(self, seed: int | None) -> bool:
        """See `BackgroundEnv`."""
        return self._begin(self._env.reset, seed=seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """What the environment's ``reset`` does, or the rest of one that has begun."""
        if self._begun is not None:
            return self._finish(self._begun)
        given = {} if options is None else {"options": options}  # which not every reset takes
        return self._thread.call(self._env.reset, seed=seed, **given)

    def begin_step(self, action: Any) -> bool:
        """See `BackgroundEnv`."""
        return self._begin(self._env.step, action)

    def tell_when_over(self, tell: Callable[[], None]) -> None:
        """See `BackgroundEnv`."""
        assert self._begun is not None
        self._begun.add_done_callback(lambda _: tell())

    def step(self, action: Any) -> Any:
        """What the environment's ``step`` does, or the rest of one that has begun."""
        if self._begun is not None:
            return self._finish(self._begun)
        return self._thread.call(self._env.step, action)

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
        self._forget()
        self._thread.call(restore_environment, self._env, state, names=self._names)

    def begin_close(self) -> None:
        """See `BackgroundEnv`."""
        if not isinstance(self._thread, _Closed):
            self._forget()
            self._closing = self._thread.begin(self._env.close)
            self._closed_by = time.monotonic() + _CLOSE_S
            self._thread.end()
            self._thread = _Closed()

    def close(self) -> None:
        """Close the environment and end its thread.

        Raises:
            TimeoutError: the environment doesn't close. Its thread ends with the process.
        """
        self.begin_close()
        closing, self._closing = self._closing, None
        if closing is None:
            return
        wait([closing], max(0.0, self._closed_by - time.monotonic()))
        if not closing.done():
            raise TimeoutError(
                f"an environment of make_in_thread was not closed within {_CLOSE_S:g} s, for it "
                "hangs in its close, or still in what it was asked for before"
            )
        closing.result()

    def _begin(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Begin it, unless nobody would see draws."""
        if draws_are_seen():
            threads.begin()
            self._begun = self._thread.begin(method, *args, **kwargs)
        return self._begun is not None

    def _forget(self) -> None:
        """Nobody asks any more for what has begun."""
        if self._begun is not None:
            self._begun = None
            threads.give_up()

    def _finish(self, begun: Future[Any]) -> Any:
        begun.exception()  # waits; what has begun still comes next if that is interrupted
        self._begun = None
        try:
            return begun.result()
        finally:
            threads.end()


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
