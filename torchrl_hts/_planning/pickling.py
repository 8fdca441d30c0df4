"""What is sent to other processes as bytes; and, where that fails, which part can't be."""

from __future__ import annotations

import dis
import functools
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrl.envs import EnvCreator

from torchrl_hts._executor.factories import WithTransforms
from torchrl_hts._policy.compiled import PolicyPickler
from torchrl_hts._processes.messages import pickled
from torchrl_hts._rounds.slots import policy_tensors

__all__ = ["find_unpicklable", "parts", "pickle_factories", "pickle_policy"]

_MAX_DEPTH = 30


def pickle_factories(factories: Sequence[Callable[[], Any]], first_env: int = 0) -> list[bytes]:
    """The factories as bytes.

    Args:
        factories: of this learner.
        first_env: the number of the first of them among those of all learners.
    """
    known: dict[int, bytes] = {}
    for number, factory in enumerate(factories, first_env):
        if id(factory) not in known:
            try:
                known[id(factory)] = pickled(factory)
            except Exception as error:
                if _shares_values(factory):
                    raise TypeError(
                        f"create_env_fn[{number}] is an EnvCreator that shares statistics "
                        "(VecNorm) between processes, which depend on timing: give the function "
                        "that it was made of, and normalise in the policy with "
                        "torchrl_hts.RunningNorm"
                    ) from error
                raise TypeError(
                    f"create_env_fn[{number}] can't be pickled, so it can't be sent to the process "
                    f"that makes the environment: {error}. "
                    f"{_blame(factory, f'create_env_fn[{number}]')}Make what it holds (locks, "
                    "files, generators, environments) inside the callable instead"
                ) from error
    return [known[id(factory)] for factory in factories]


def _shares_values(factory: Any) -> bool:
    """Whether it is TorchRL's `EnvCreator`, alone or wrapped, of an environment that shares."""
    while isinstance(factory, functools.partial | WithTransforms):
        factory = factory.func if isinstance(factory, functools.partial) else factory.factory
    return isinstance(factory, EnvCreator) and bool(factory._mp_values)


def pickle_policy(policy: nn.Module) -> bytes:
    """The policy as bytes, its tensors on the CPU: no other process is to touch its device.

    What was compiled is left out, not what it was made from.
    """
    try:
        copy = pickled(policy, PolicyPickler)
        if any(tensor.device.type != "cpu" for _, tensor in policy_tensors(policy)):
            copy = pickled(pickle.loads(copy).to("cpu"), PolicyPickler)
        return copy
    except Exception as error:
        raise TypeError(
            f"the policy can't be pickled, so it can't be sent to the actors: {error}. "
            f"{_blame(policy, 'policy')}Keep locks, files, generators and loggers out of modules"
        ) from error


def _blame(value: object, name: str) -> str:
    found = find_unpicklable(value, name)
    if found is None:
        return ""
    where, culprit = found
    return f"It is {where}, a {type(culprit).__module__}.{type(culprit).__qualname__}. "


def find_unpicklable(value: object, name: str) -> tuple[str, object] | None:
    """The innermost part of a value that can't be pickled, with its name; None if all can.

    Args:
        value: to look into.
        name: what it is called.

    Example:
        >>> import functools, threading
        >>> make = functools.partial(print, end=threading.Lock())
        >>> find_unpicklable(make, "create_env_fn[0]")[0]
        "create_env_fn[0].keywords['end']"
    """
    if _can_be_pickled(value):
        return None
    seen = {id(value)}
    for _ in range(_MAX_DEPTH):
        for part_name, part in parts(value, name):
            if id(part) not in seen and not _can_be_pickled(part):
                seen.add(id(part))
                value, name = part, part_name
                break
        else:
            break
    return name, value


def _can_be_pickled(value: object) -> bool:
    try:
        pickled(value, PolicyPickler)
    except Exception:
        return False
    return True


def parts(value: Any, name: str) -> Iterator[tuple[str, object]]:
    """What a value holds, with names that lead there."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield f"{name}.func", value.func
        yield from parts(value.args, f"{name}.args")
        yield from parts(value.keywords, f"{name}.keywords")
    elif isinstance(value, types.MethodType):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        for variable, cell in zip(value.__code__.co_freevars, cells, strict=True):
            try:
                yield f"{name}: its variable {variable!r}", cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from parts(value.__defaults__ or (), f"{name}.__defaults__")
        yield from parts(value.__kwdefaults__ or {}, f"{name}.__kwdefaults__")
        for variable in _globals_of(value.__code__):
            if variable in value.__globals__:
                yield f"{name}: the global {variable!r}", value.__globals__[variable]
    else:
        if isinstance(value, nn.Module):  # by the names that modules go by
            for part_name, part in value.named_children():
                yield f"{name}.{part_name}", part
        for attribute, part in getattr(value, "__dict__", {}).items():
            yield f"{name}.{attribute}", part


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function names, and those within it do; attributes are none."""
    found = dict.fromkeys(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_globals_of(constant))
    return tuple(found)
