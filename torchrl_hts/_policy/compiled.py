"""Policies that `torch.compile` has wrapped: workers run what was compiled as it is.

A compiled network is made anew for other batch sizes, in each process, and gives other bits at
each. What actors gain by it is small (docs/results/what_was_tried.md). The parameters are those of
the module within, so a learner may run the compiled policy that it has.
"""

from __future__ import annotations

import types
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import torch
from tensordict.nn import CudaGraphModule, TensorDictModule
from torch import nn
from torch.nn.utils import parametrize

from torchrl_hts.errors.wrapped import is_sharded

__all__ = ["PolicyPickler", "check_wrapping", "eagerly", "plain_name", "uncompiled"]


def uncompiled(value: Any) -> Any:
    """What lies within a compiled module or function; anything else as it is.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> uncompiled(torch.compile(net)) is net
        True
    """
    while True:
        if isinstance(value, torch._dynamo.OptimizedModule):
            value = value._orig_mod
        elif isinstance(value, types.FunctionType) and "_torchdynamo_orig_callable" in vars(value):
            value = vars(value)["_torchdynamo_orig_callable"]
        else:
            return value


def plain_name(name: str) -> str:
    """A parameter's name without the levels that `torch.compile` has put in.

    Example:
        >>> plain_name("_orig_mod.module.0._orig_mod.weight")
        'module.0.weight'
    """
    return name.replace("_orig_mod.", "")


def eagerly() -> AbstractContextManager[object]:
    """A context in which what is compiled runs as it was written."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _same(value: Any) -> Any:
    return value


def _with_attributes(kind: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    module = kind.__new__(kind)
    vars(module).update(attributes)
    return module


class PolicyPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles what lies within compiled modules and functions, and parametrized modules.

    Those refuse pickle since their classes are made as they are; cloudpickle takes such classes.
    """

    def reducer_override(self, obj: Any) -> Any:
        """How an object is pickled, where pickle is not to say it."""
        plain = uncompiled(obj)
        if plain is not obj:
            return _same, (plain,)
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return _with_attributes, (type(obj), vars(obj))
        if isinstance(obj, TensorDictModule):  # which pickles a function by itself
            function = vars(obj).get("module")
            plain = uncompiled(function)
            if plain is not function:
                return _with_attributes, (type(obj), {**vars(obj), "module": plain})
        return super().reducer_override(obj)


def _refuse_exported(what: str, value: object) -> None:
    """Raise TypeError if `torch.export` has made it: a program, or a module out of one."""
    if any(kind.__module__.startswith("torch.export.") for kind in type(value).__mro__):
        raise TypeError(
            f"{what} was made by torch.export ({type(value).__name__}), whose programs can't be "
            "sent to other processes: give the nn.Module that was exported"
        )


def _refuse_jit(what: str, value: object) -> None:
    """Raise TypeError if `torch.jit` has made it."""
    if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise TypeError(
            f"{what} is a torch.jit module or function ({type(value).__name__}), whose bits may "
            "change while it optimises itself in its first calls: give what was scripted or traced"
        )


def check_wrapping(policy: object) -> None:
    """Refuse a policy that is wrapped, or has a part that is, in what actors can't run.

    Raises:
        TypeError: with what to give instead.
    """
    if isinstance(policy, CudaGraphModule):
        raise TypeError(
            "the policy is a CudaGraphModule, which replays one shape of batch on one device: give "
            "the policy that it wraps, policy.module, and keep the graph for the learner"
        )
    _refuse_exported("the policy", policy)
    _refuse_jit("the policy", policy)
    parts = policy.named_modules() if isinstance(policy, nn.Module) else ()
    for name, module in parts:
        what = f"the policy's part {name!r}" if name else "the policy"
        kind = type(module).__name__
        _refuse_exported(what, module)
        _refuse_jit(what, module)
        for value in vars(module).values():
            _refuse_jit(f"a part of {what}", value)
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{what} is wrapped in {kind}, which spreads batches over devices: give the module "
                "that it wraps, its .module, which has the same parameters"
            )
        if is_sharded(module):
            raise TypeError(
                f"{what} is sharded ({kind}), so that a process has a part of its parameters: give "
                "a policy with the same module before it was sharded, and stage whole values with "
                "update_policy_weights_"
            )
        if any(isinstance(value, CudaGraphModule) for value in vars(module).values()):
            raise TypeError(
                f"{what} holds a CudaGraphModule, which replays one shape of batch on one device: "
                "give a policy with the module that it wraps, its .module, in its place"
            )
