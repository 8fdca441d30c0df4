"""What the Ray actor of a remote environment holds, and what it sends: values and exceptions.

Values are pickled here and not by Ray, whose arrays can't be written to and whose memory belongs to
its object store.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar

import cloudpickle
import gymnasium as gym

from torchrl_hts._executor.generators import Generators, GeneratorState
from torchrl_hts._executor.own_seeds import seed_from_own_draws, unseeded_spaces
from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts._processes.registrations import Registrations
from torchrl_hts.env_state import names_of, restore_environment, save_environment
from torchrl_hts.env_state.names import Names

__all__ = ["ActorTracebackError", "Simulator", "returned"]

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


class ActorTracebackError(Exception):
    """The traceback of an exception in an actor, as text: the cause of the one that is raised."""


@dataclass(frozen=True)
class _Raised:
    """What a method of a `Simulator` returns where it raises. Ray itself can't send all exceptions.

    Attributes:
        said: the exception's class and message.
        traceback: of it, as text, and where that was.
        pickled: the exception; empty if it can't be pickled, or is not one of the environment's.
    """

    said: str
    traceback: str
    pickled: bytes

    @classmethod
    def of(cls, error: BaseException) -> _Raised:
        """How an exception is told of."""
        pickled = b""
        if isinstance(error, Exception):  # others would end, or interrupt, the process that asked
            with contextlib.suppress(Exception):
                pickled = cloudpickle.dumps(error)
        said = traceback.format_exception_only(error)[-1].strip()
        lines = "".join(traceback.format_exception(error))
        return cls(said, f"in process {os.getpid()} on {socket.gethostname()}\n{lines}", pickled)

    def again(self) -> NoReturn:
        """Raise it in this process."""
        error: Any = None
        with contextlib.suppress(Exception):
            error = pickle.loads(self.pickled)
        if not isinstance(error, Exception):
            error = RuntimeError(
                f"a remote environment raised what can't be raised in this process: {self.said}"
            )
        raise error from ActorTracebackError(self.traceback)


def _told(method: Callable[Arguments, Value]) -> Callable[Arguments, Value | _Raised]:
    @functools.wraps(method)
    def told(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value | _Raised:
        try:
            return method(*args, **kwargs)
        except SystemExit:  # as which Ray tells an actor, too, that it is to end
            raise
        except BaseException as error:
            return _Raised.of(error)

    return told


class Simulator:
    """What an actor holds: one environment, and what an executor would put around it.

    What its methods return is pickled, and what they raise is returned as `_Raised`.
    """

    @_told
    @unseeded_spaces()
    def make(
        self,
        factory: Callable[[], Any],
        generators: GeneratorState | None,
        registrations: Registrations,
    ) -> bytes:
        """Make the environment; returns what its other side shows of it.

        Args:
            factory: of the environment.
            generators: what may be drawn from meanwhile; by default new ones.
            registrations: of environments that the factory may make by id.

        Raises:
            TypeError: if it makes anything but one gymnasium environment.
        """
        registrations.take_over(())
        seed_from_own_draws()
        self._generators = Generators(0)
        if generators is not None:
            self._generators.restore(generators)
        self._generators.enter()
        env: Any = factory()
        self._env = env
        if isinstance(env, gym.vector.VectorEnv) or not isinstance(env, gym.Env):
            raise TypeError(
                f"make_remote's factory made a {type(env).__module__}.{type(env).__qualname__}; "
                "expected one gymnasium.Env"
            )
        own_spaces(env)
        self._names: Names | None = None
        with contextlib.suppress(Exception):  # which is met again, and told, where it is saved
            self._names = names_of(env)
        shown = ("observation_space", "action_space", "metadata", "render_mode")
        return _packed({name: getattr(env, name) for name in shown}, "the spaces and metadata")

    @_told
    def reset(self, seed: int | None, options: dict[str, Any] | None) -> bytes:
        """What the environment's ``reset`` does."""
        if seed is not None:
            self._generators.seed(seed)
            seed_spaces(self._env, seed)
        self._generators.enter()
        given = {} if options is None else {"options": options}  # which not every reset takes
        return _packed(self._env.reset(seed=seed, **given), "what its reset returned")

    @_told
    def step(self, action: bytes, goes_on: bool = False) -> bytes | tuple[bytes, bytes | _Raised]:
        """What the environment's ``step`` does.

        Args:
            action: pickled.
            goes_on: whether an episode that ends is followed by the next one at once. What
                ``reset`` does then comes second.
        """
        self._generators.enter_step()
        outcome = self._env.step(pickle.loads(action))
        packed = _packed(outcome, "what its step returned")
        return (packed, self.reset(None, None)) if goes_on and _has_ended(outcome) else packed

    @_told
    def render(self) -> bytes:
        """What the environment's ``render`` does."""
        self._generators.enter()
        return _packed(self._env.render(), "what its render returned")

    @_told
    def get_state(self) -> bytes:
        """All that its future depends on."""
        self._generators.enter()
        own = self._generators.state()
        return _packed(save_environment(self._env, own, names=self._names), "its state")

    @_told
    def set_state(self, state: bytes) -> None:
        """Go on where `get_state` was called, in another actor maybe."""
        self._generators.enter()
        own = restore_environment(self._env, state, names=self._names)
        self._generators.restore(own)

    @_told
    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _has_ended(outcome: Any) -> bool:
    try:
        _, _, terminated, truncated, _ = outcome
        return bool(terminated or truncated)
    except Exception:  # the executor looks at it once more, and says what it is
        return False


def _packed(value: Any, what: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"a remote environment's {what} can't be pickled ({error}): leave out what belongs to "
            "its process alone"
        ) from error


def returned(value: Any) -> Any:
    """What a method of a `Simulator` has returned, once it is here; raises what it has raised."""
    if isinstance(value, _Raised):
        value.again()
    return value
