"""Environments in Ray actors, on any machine of a cluster, as plain gymnasium environments.

An actor runs its environment as an executor would, with the same generators and spaces, and so with
the same bits. The executor's side is a `BackgroundEnv`: several simulators of one executor step at
the same time, and whichever is ready goes on. Ray carries all that goes between the two.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts._executor.generators import entered_state
from torchrl_hts._processes.registrations import Registrations
from torchrl_hts._processes.surroundings import WORKER_ENVIRONMENT
from torchrl_hts.envs.ray_cluster import connected_ray, imported_ray
from torchrl_hts.envs.simulator import Simulator, returned
from torchrl_hts.errors.checks import check_seconds

__all__ = ["RemoteEnv", "make_remote"]

# With others Ray would go on with an environment that has forgotten its episode, or take steps out
# of their order, or leave actors behind, or have two environments in one.
_FIXED = {
    "get_if_exists": False,
    "lifetime": None,
    "max_concurrency": 1,
    "max_restarts": 0,
    "max_task_retries": 0,
}

_CLOSE_S = 30.0


class _Closed:
    """In the place of the actor of an environment that has been closed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise gym.error.ClosedEnvironmentError(
            f"a remote environment has been closed, and its actor has ended: {name}() comes too "
            "late. Make a new one"
        )


class RemoteEnv(BackgroundEnv):
    """The environment of a `Simulator` in a Ray actor; made by `make_remote`.

    Args:
        actor: Ray's handle of it.
        shown: what `Simulator.make` returned.
    """

    tells = True
    begins_episodes = True

    def __init__(self, actor: Any, shown: dict[str, Any]) -> None:
        self.observation_space = shown["observation_space"]
        self.action_space = shown["action_space"]
        self.metadata = shown["metadata"]
        self.render_mode = shown["render_mode"]
        self._actor = actor
        self._begun: Any = None  # what has begun, and comes next: Ray's reference, or its future
        self._closing: Any = None  # Ray's reference
        self._next: Any = None  # the episode that follows, if its beginning has come with a step

    @property  # type: ignore[misc]  # nothing may be set
    def np_random(self) -> np.random.Generator:
        """There is none on this side.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            "a remote environment has no np_random on this side: put wrappers that draw from it "
            "into make_remote's factory"
        )

    def begin_reset(self, seed: int | None) -> bool:
        """See `BackgroundEnv`."""
        if seed is None and self._next is not None:
            return False
        self._begun = self._actor.reset.remote(seed, None)
        return True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """What the environment's ``reset`` does, or the rest of one that has begun."""
        begun, self._begun = self._begun, None
        following, self._next = self._next, None
        if following is not None and seed is None and options is None:
            return pickle.loads(returned(following))
        return _result(begun or self._actor.reset.remote(seed, options))

    def begin_step(self, action: Any) -> bool:
        """See `BackgroundEnv`."""
        self._begun = self._actor.step.remote(pickle.dumps(action), goes_on=True)
        return True

    def tell_when_over(self, tell: Callable[[], None]) -> None:
        """See `BackgroundEnv`."""
        self._begun = self._begun.future()
        self._begun.add_done_callback(lambda _: tell())

    def step(self, action: Any) -> Any:
        """What the environment's ``step`` does, or the rest of one that has begun."""
        begun, self._begun = self._begun, None
        found = _get(begun or self._actor.step.remote(pickle.dumps(action)))
        if isinstance(found, tuple):
            found, self._next = found
        return pickle.loads(found)

    def render(self) -> Any:
        """What the environment's ``render`` does."""
        return _result(self._actor.render.remote())

    def get_state(self) -> bytes:
        """All that its future depends on.

        Raises:
            CannotSaveError: if the environment holds something that can't be saved.
        """
        state: bytes = _result(self._actor.get_state.remote())
        return state

    def set_state(self, state: bytes) -> None:
        """Go on where `get_state` was called, in another process maybe."""
        self._begun = self._next = None
        _result(self._actor.set_state.remote(state))

    def begin_close(self) -> None:
        """See `BackgroundEnv`."""
        with contextlib.suppress(Exception):  # which is met again by `close`
            self._closing = self._actor.close.remote()

    def close(self) -> None:
        """Close the environment and end its actor.

        Raises:
            TimeoutError: the environment doesn't close; the actor has ended all the same.
        """
        actor, self._actor = self._actor, _Closed()
        if isinstance(actor, _Closed):
            return
        ray = imported_ray()
        try:
            with contextlib.suppress(ray.exceptions.RayActorError):  # it has ended already
                closing = self._closing or actor.close.remote()
                returned(ray.get(closing, timeout=_CLOSE_S))
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"a remote environment was not closed within {_CLOSE_S:g} s, for it hangs in its "
                "close, or still in what it was asked for before. Its actor is ended"
            ) from error
        finally:
            ray.kill(actor)


def make_remote(
    factory: Callable[[], gym.Env[Any, Any]],
    *,
    address: str = "auto",
    start_timeout_s: float = 300.0,
    **options: Any,
) -> gym.Env[Any, Any]:
    """Makes an environment in a Ray actor, anywhere in a cluster; never imports torch.

    It gives the same bits as ``factory()`` would in this process: seeds, spaces, generators and
    saved states are those of the environment itself. Whatever is to be around it belongs into the
    factory. With the environment, or the process that made it, ends the actor. Connects this
    process to the cluster, if it isn't. Blocks until the environment has been made.

    Args:
        factory: makes one gymnasium environment. It is pickled, and the machines of the cluster
            need torchrl_hts and what it imports.
        address: of the cluster, as `ray.init` takes it; by default ``RAY_ADDRESS``, or the cluster
            that this machine is a part of.
        start_timeout_s: how long it may take until the environment has been made, in seconds, once
            this process is connected to the cluster.
        options: of the actor, as Ray's ``options`` takes them: ``num_cpus``, ``resources``,
            ``scheduling_strategy``, ``runtime_env``, ...

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: there is no such cluster, or it doesn't let this process in.
        TimeoutError: no machine has what the options ask for, or the factory takes too long.
        TypeError: the factory can't be called, the time is no number, or ``runtime_env`` no dict.
        ValueError: an option has Ray start the actor anew, share it, or leave it behind; or the
            time is not positive.
        RuntimeError: from methods of the environment too, when the actor has ended.

    Example::

        make = partial(make_remote, make_simulator, num_cpus=1)
        collector = HTSCollector([make] * 32, policy, num_executors=4, ...)
    """
    given = {name: options[name] for name in _FIXED if name in options}
    if refused := [f"{name}={value!r}" for name, value in given.items() if value != _FIXED[name]]:
        raise ValueError(
            f"make_remote takes no {' and no '.join(refused)}: an environment would lose its "
            "episode, share its actor with another, or outlive its collector. HTSCollector "
            "replaces what fails with on_executor_failure='restart'"
        )
    environment = _checked(factory, start_timeout_s, options.get("runtime_env"))
    # As in executors: one thread, where Ray gives as many as CPUs, and one order of sets.
    fixed = {**WORKER_ENVIRONMENT, "PYTHONHASHSEED": "0"}
    variables = {**fixed, **(environment.get("env_vars") or {})}
    completed = {**options, "runtime_env": {**environment, "env_vars": variables}}
    generators = entered_state()  # before Ray can draw from them
    ray = connected_ray(address)
    actor = ray.remote(Simulator).options(**completed).remote()
    try:
        shown = _result(
            actor.make.remote(factory, generators, Registrations.here()), start_timeout_s
        )
    except BaseException as error:
        ray.kill(actor)
        if not isinstance(error, ray.exceptions.GetTimeoutError):
            raise
        raise TimeoutError(
            f"a remote environment was not made within {start_timeout_s:g} s. Its actor asks for "
            f"{options or 'nothing'}, and the cluster has {ray.available_resources()} left of "
            f"{ray.cluster_resources()}: ask for less, add machines, or raise start_timeout_s if "
            "the environment takes so long"
        ) from error
    return RemoteEnv(actor, shown)


def _checked(factory: Any, start_timeout_s: Any, runtime_env: Any) -> dict[str, Any]:
    """The ``runtime_env``, if an actor can be made with all of it."""
    if not callable(factory):
        raise TypeError(
            "make_remote takes a factory, which makes one gymnasium environment when it is called "
            f"without arguments; got {factory!r}. Give a function, or functools.partial(make, ...)"
        )
    check_seconds("start_timeout_s", start_timeout_s)
    if not isinstance(runtime_env, Mapping | None):
        raise TypeError(
            "make_remote's runtime_env must be a dict, as runtime_env={'working_dir': '.'}; got "
            f"{runtime_env!r}"
        )
    found = dict(runtime_env or {})
    if not isinstance(found.get("env_vars"), Mapping | None):
        raise TypeError(
            "the env_vars of make_remote's runtime_env must be a dict of names and values; got "
            f"{found['env_vars']!r}"
        )
    return found


def _result(reference: Any, timeout_s: float | None = None) -> Any:
    packed: bytes | None = _get(reference, timeout_s)
    return None if packed is None else pickle.loads(packed)


def _get(reference: Any, timeout_s: float | None = None) -> Any:
    """What a method of the actor returned, or raise what it raised."""
    ray = imported_ray()
    try:
        is_future = isinstance(reference, Future)
        value = reference.result() if is_future else ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:  # of Ray, before the method begins
        raise (error.cause or error) from error
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"the Ray actor of a remote environment has ended: {error}") from error
    return returned(value)
