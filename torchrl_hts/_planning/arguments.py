"""The collector's boundary: arguments are checked once, with an error that says what to do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from numbers import Real
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torchrl.envs import EnvBase

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._planning.batched_envs import factories_of
from torchrl_hts._planning.instances import copier
from torchrl_hts._planning.lazy_policies import Example, initialise
from torchrl_hts._planning.policy_forms import as_module, required_parameters
from torchrl_hts._planning.policy_parts import check_tensors
from torchrl_hts._policy.compiled import check_wrapping, uncompiled
from torchrl_hts._rounds.exchange import MAX_ENVS, MAX_PENDING
from torchrl_hts.errors.checks import check_integer, check_seconds

__all__ = [
    "MAX_THREADS",
    "Device",
    "check_callables",
    "check_devices",
    "check_equal",
    "check_factories",
    "check_factory",
    "check_frames",
    "check_lag",
    "check_max_frames",
    "check_on_failure",
    "check_seed",
    "check_storage_dir",
    "check_timeouts",
    "find_factories",
    "make_policy",
]

Device = torch.device | str | int | None

MAX_LAG = 1000  # a slot each
MAX_THREADS = 1024  # torch crashes with a hundred times as many


def check_timeouts(timeout_s: Any) -> dict[str, float]:
    """Seconds by kind of worker, from a number, a dict or None."""
    if timeout_s is None:
        return {}
    kinds = ("executor", "actor")
    if not isinstance(timeout_s, Mapping):
        return dict.fromkeys(kinds, check_seconds("timeout_s", timeout_s))
    unknown = [kind for kind in timeout_s if kind not in kinds]
    if unknown:
        raise ValueError(f"timeout_s has the key {unknown[0]!r}; expected 'executor' or 'actor'")
    return {
        kind: check_seconds(f"timeout_s[{kind!r}]", value)
        for kind, value in timeout_s.items()
        if value is not None
    }


def check_on_failure(value: Any) -> str:
    """What is done about executors that fail."""
    if not isinstance(value, str) or value not in ("raise", "restart"):
        raise ValueError(f"on_executor_failure must be 'raise' or 'restart', got {value!r}")
    return value


def check_storage_dir(storage_dir: Any) -> str | None:
    """An existing directory that may be written to, or None."""
    if storage_dir is None:
        return None
    if not isinstance(storage_dir, str | os.PathLike):
        raise TypeError(f"storage_dir must be a path or None, got {storage_dir!r}")
    path = os.fsdecode(storage_dir)
    if not path:
        raise ValueError("storage_dir='' is not a directory; '.' is the one that you are in")
    try:
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ValueError(
            f"storage_dir={path!r} is not a directory that can be written to: {error.strerror}"
        ) from error


def check_devices(
    device: Device, storing: Device, policy: Device, env: Device
) -> tuple[str | None, str | None, str | None]:
    """Names of the storing, policy and environment devices; ``device`` is the default of each."""
    given = {"storing_device": storing, "policy_device": policy, "env_device": env}
    default = _check_device("device", device)
    found = [_check_device(name, value) or default for name, value in given.items()]
    return found[0], found[1], found[2]


def _check_device(name: str, device: Device) -> str | None:
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={device!r} is not a device: {error}") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{name}={str(found)!r}, but torch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices on this machine"
        )
    if found.type not in ("cpu", "cuda"):
        try:
            if found.type == "meta":
                raise RuntimeError("its tensors have no values")
            torch.empty(0, device=found)
        except (RuntimeError, AssertionError, ImportError):  # with a page about torch's backends
            raise ValueError(
                f"{name}={str(found)!r}, but torch {torch.__version__} can't keep values on such a "
                "device on this machine"
            ) from None
    return str(found)


def check_lag(lag: Any, num_envs: int) -> int:
    """The lag, so that the learner's inbox holds what is done while it learns."""
    checked = check_integer("lag", lag, least=0, most=MAX_LAG)
    most = MAX_PENDING // num_envs - 1
    if checked > most:
        raise ValueError(f"lag must be at most {most} with {num_envs} environments, got {lag}")
    return checked


def check_frames(frames_per_batch: Any, total_frames: Any) -> tuple[int, int | None]:
    """Frames of a batch and of the run, as they are asked for; None for an endless run."""
    frames_per_batch = check_integer("frames_per_batch", frames_per_batch)
    if total_frames is None or (isinstance(total_frames, Real) and total_frames == inf):
        return frames_per_batch, None
    total_frames = check_integer("total_frames", total_frames, least=-1)
    return frames_per_batch, None if total_frames < 0 else total_frames


def check_max_frames(value: Any) -> int:
    """The length at which episodes are truncated; 0 for never, which TorchRL also calls -1."""
    return max(0, check_integer("max_frames_per_traj", 0 if value is None else value, least=-1))


def check_callables(**given: Any) -> None:
    """Arguments that must be callable, where they are given."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be callable, got {value!r}")


def check_seed(seed: int | None) -> int:
    """A seed; None draws one from torch's global generator."""
    if seed is None:
        return int(torch.randint(2**62, ()))
    return check_integer("seed", seed, least=0, most=None)


def check_factories(
    create_env_fn: Any,
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    copies: int | None = None,
) -> list[Callable[[], Any]]:
    """The factories alone; see `find_factories`."""
    return find_factories(create_env_fn, kwargs, copies)[0]


def find_factories(
    create_env_fn: Any,
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    copies: int | None = None,
) -> tuple[list[Callable[[], Any]], bool]:
    """A callable per environment, with its keyword arguments bound.

    Args:
        create_env_fn: a callable, or a list of them.
        kwargs: keyword arguments of all, or a list with those of each.
        copies: how many environments to make of one callable; a list must have so many.

    Returns:
        The factories, and whether it is one that stood in no list, and is no part of a `SerialEnv`.
    """
    listed = isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str)
    if listed:
        functions = list(create_env_fn)
        if copies not in (None, len(functions)):
            raise ValueError(
                f"num_workers={copies}, but create_env_fn lists {len(functions)} environments; "
                "give one that is to be copied, or leave num_workers out"
            )
    else:
        functions = [create_env_fn] * (copies or 1)
    each = _kwargs_of(functions, kwargs)
    factories: list[Callable[[], Any]] = []
    is_alone = not listed and copies is None
    known: dict[tuple[int, int], Sequence[Callable[[], Any]]] = {}
    for index, (function, own) in enumerate(zip(functions, each, strict=True)):
        if (id(function), id(own)) not in known:
            name = f"create_env_fn[{index}]" if listed else "create_env_fn"
            apart = _taken_apart(name, function, own)
            is_alone = is_alone and apart is None
            known[id(function), id(own)] = apart or [
                _one_factory(name, function, own, may_be_list=not listed)
            ]
        factories += known[id(function), id(own)]
    if not 0 < len(factories) <= MAX_ENVS:
        raise ValueError(
            f"create_env_fn must have 1 to {MAX_ENVS} callables, one per environment; "
            f"got {len(factories)}"
        )
    return factories, is_alone


def check_factory(function: Any, name: str = "create_env_fn") -> Sequence[Callable[[], Any]]:
    """The factory that must stand alone; those of each environment, if it makes a `SerialEnv`."""
    return _taken_apart(name, function, {}) or [_one_factory(name, function, {}, may_be_list=False)]


def _taken_apart(
    name: str, function: Any, kwargs: Mapping[str, Any]
) -> list[Callable[[], Any]] | None:
    """The factories of an entry that is a batch of environments, or makes one; None for others."""
    if isinstance(function, str):
        raise TypeError(
            f"{name} is {function!r}; expected a callable that makes an environment, such as "
            f"functools.partial(gymnasium.make, {function!r})"
        )
    return factories_of(function, kwargs)


def _one_factory(
    name: str, function: Any, kwargs: Mapping[str, Any], *, may_be_list: bool
) -> Callable[[], Any]:
    """The factory of one entry.

    Args:
        name: of the entry, for messages.
        function: the entry.
        kwargs: its keyword arguments.
        may_be_list: whether a list could stand there, too.
    """
    if isinstance(function, EnvBase):
        if kwargs:
            raise TypeError(f"{name} is an environment: create_env_kwargs are for callables")
        return copier(function, name)
    if isinstance(function, gym.Env) or not callable(function):
        expected = "a callable that makes an environment, since each is made in the process that "
        expected += "steps it"
        if isinstance(function, Iterable):
            expected = "one callable that makes an environment"
            if may_be_list:
                expected = "a callable or a list of callables: list(...)"
        raise TypeError(f"{name} is a {type(function).__name__}; expected {expected}")
    return partial(function, **kwargs) if kwargs else function


def _kwargs_of(functions: Sequence[Any], kwargs: Any) -> Sequence[Mapping[str, Any]]:
    """Keyword arguments of each."""
    if kwargs is None:
        kwargs = {}
    each = [kwargs] * len(functions) if isinstance(kwargs, Mapping) else kwargs
    if not isinstance(each, Sequence) or not all(isinstance(own, Mapping) for own in each):
        raise TypeError(f"create_env_kwargs must be a dict or a list of dicts, got {kwargs!r}")
    if not all(isinstance(name, str) for own in each for name in own):
        raise TypeError(f"create_env_kwargs must have names as keys, got {kwargs!r}")
    if len(each) != len(functions):
        raise ValueError(
            f"create_env_kwargs has {len(each)} dicts for {len(functions)} environments"
        )
    return each


def make_policy(
    policy: Any,
    policy_factory: Any,
    *,
    trust_policy: bool = False,
    example: Example | None = None,
) -> TensorDictModuleBase:
    """The policy as a module on TensorDicts; one for random actions if there is none.

    Args:
        policy, policy_factory, trust_policy: of a collector.
        example: of what a lazy policy is initialised with.
    """
    if isinstance(policy_factory, list | tuple) and policy_factory:
        if any(factory is not policy_factory[0] for factory in policy_factory):
            raise TypeError(
                "policy_factory lists several factories, but one policy acts in all environments: "
                "give one factory"
            )
        policy_factory = policy_factory[0]
    check_callables(policy_factory=policy_factory)
    if policy is not None and policy_factory is not None:
        raise TypeError("give either policy or policy_factory, not both")
    if policy_factory is not None:
        policy = policy_factory()
    check_wrapping(policy)
    policy = as_module(policy, trust_policy=trust_policy)
    module = _on_tensordicts(policy)
    why = None
    if example is not None:
        try:
            initialise(module, example)
        except Exception as error:  # of the user's policy or environment
            why = error
    check_tensors(policy, why)
    return module


def _on_tensordicts(policy: Any) -> TensorDictModuleBase:
    """A policy as a module on TensorDicts, which reads the only observation if it is none."""
    if isinstance(policy, TensorDictModuleBase):
        return policy
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        return policy  # compiled, or wrapped
    parameters = list(required_parameters(uncompiled(policy).forward))
    in_keys = parameters if len(parameters) > 1 else ["observation"]
    return TensorDictModule(policy, in_keys=in_keys, out_keys=["action"])


def check_equal(
    descriptions: Sequence[GymDescription | TorchRLDescription], first_env: int = 0
) -> None:
    """All environments must look alike, since they share one batch.

    Args:
        descriptions: of this learner's environments.
        first_env: the number of the first of them among the environments of all learners.
    """
    first = descriptions[0]
    for number, other in enumerate(descriptions[1:], first_env + 1):
        if type(other) is not type(first):
            raise ValueError(
                f"environment {number} is not of the same kind as environment {first_env}: one is "
                "a gymnasium environment, the other a TorchRL one"
            )
        for what, one, two in _differing(first, other):
            if one != two:
                raise ValueError(
                    f"environment {number} differs from environment {first_env} in its {what}:\n"
                    f"  environment {first_env}: {one}\n  environment {number}: {two}\n"
                    "All environments of a collector share one batch and must have equal spaces"
                )


def are_alike(one: Any, other: Any) -> bool:
    """Whether environments of two descriptions can share a batch."""
    return type(one) is type(other) and all(a == b for _, a, b in _differing(one, other))


def _differing(first: Any, other: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(first, GymDescription):
        names = ["observation_space", "action_space"]
        return [(name, getattr(first, name), getattr(other, name)) for name in names]
    one, two = (dict(both.specs.items(True, True)) for both in (first, other))
    parts = [(f"spec {key!r}", one.get(key), two.get(key)) for key in {**one, **two}]
    return [*parts, ("specs", first.specs, other.specs)]
