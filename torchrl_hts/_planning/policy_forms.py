"""What users pass as a policy besides modules on TensorDicts: nothing at all, and callables.

`as_module` makes a module of each. Those that must know the environment first are `Fitted` to it
once the executors have described it.

Axes: m rows of a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs import EnvBase, InitTracker, Transform
from torchrl.modules.tensordict_module.exploration import RandomPolicy
from torchrl.modules.utils import get_primers_from_module

from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._executor.trial_observations import gym_reader
from torchrl_hts._planning.fitted import Description, Fitted
from torchrl_hts._planning.policy_parts import networks_in
from torchrl_hts._planning.random_actions import RandomActions
from torchrl_hts._policy.compiled import uncompiled
from torchrl_hts.errors import PolicyError

__all__ = [
    "OnTensorDicts",
    "as_module",
    "required_parameters",
    "transforms_of",
]

_ROWS = 4  # of a trial
_RANDOM = ("rand_step", "rand_action")  # methods of environments that TorchRL's examples pass


class OnTensorDicts(Fitted):
    """A callable from TensorDict to TensorDict, as a module.

    It is given all that the environment observes, and what it writes is found in a trial.

    Args:
        function: takes a TensorDict ``[m]``, writes at least the action for each row, and returns
            it or another one.
        in_keys, out_keys: what it reads and writes, if it is known.
    """

    def __init__(
        self,
        function: Callable[[TensorDictBase], TensorDictBase],
        in_keys: Sequence[Any] = (),
        out_keys: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self.function = function
        self.in_keys, self.out_keys = list(in_keys), list(out_keys)

    def fit(self, description: Description) -> None:
        """Read all observations; write what the callable writes for some."""
        if self.out_keys:
            return
        inputs = _observations(description)
        self.in_keys = list(inputs.keys(True, True))
        given = dict(inputs.items(True, True))
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                written = self.function(inputs.copy())
        except Exception as error:
            raise PolicyError(
                f"the policy failed in a trial on {inputs.batch_size[0]} observations "
                f"({type(error).__name__}: {error}): name its keys by wrapping it as "
                "TensorDictModule(policy, in_keys=[...], out_keys=['action'])"
            ) from error
        if not isinstance(written, TensorDictBase):
            raise PolicyError(
                f"the policy was given a TensorDict and returned a {type(written).__name__}; "
                "return the TensorDict with the action in it"
            )
        self.out_keys = [
            key for key, value in written.items(True, True) if value is not given.get(key)
        ]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call it, and keep what it wrote in the trial."""
        written = self.function(tensordict)
        if written is tensordict:
            return tensordict
        return tensordict.update(written.select(*self.out_keys, strict=False))


class _OnRows:
    """A callable from tensors ``[m, ...]`` to an action for each row; a list is made a tensor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *inputs: Tensor) -> Tensor | np.ndarray[Any, Any]:
        found = self._function(*inputs)
        actions = found if isinstance(found, Tensor | np.ndarray) else torch.as_tensor(found)
        rows = inputs[0].shape[0]
        if actions.shape[:1] != (rows,):
            raise ValueError(
                f"the policy returned values of shape {tuple(actions.shape)} for {rows} "
                "observations; return one action for each"
            )
        return actions


def _observations(description: Description) -> TensorDictBase:
    """Observations for a trial, ``[m]``: real ones where some are known."""
    known = description.observations
    if isinstance(description, TorchRLDescription):
        if known is not None:
            return known.values.select(*description.state_keys, strict=False)
        root = description.transition.select(*description.state_keys, strict=False)
        return root.expand(_ROWS, *root.batch_size).clone()
    if known is not None:
        values = {key: torch.from_numpy(array.copy()) for key, array in known.values.items()}
        return TensorDict({}, [len(known.lengths)]).update(values)
    read = gym_reader(description.observation_space)
    description.observation_space.seed(0)
    samples = [read(description.observation_space.sample()) for _ in range(_ROWS)]
    stacked = {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}
    return TensorDict({}, [_ROWS]).update(stacked)


def as_module(policy: Any, *, trust_policy: bool = False) -> Any:
    """A module that does what the policy does.

    Args:
        policy: None, a ``RandomPolicy`` or an environment's ``rand_step`` for random actions, a
            module, or a callable. One with a single parameter called ``tensordict`` or ``td``, or
            annotated as a TensorDict, is given TensorDicts; others tensors.
        trust_policy: give it TensorDicts whatever its parameters.

    Raises:
        TypeError: for what can't be called, and for a function that uses a module, whose
            parameters nobody could follow.
    """
    if policy is None:
        return RandomActions()
    if isinstance(policy, type):
        raise TypeError(
            f"policy must be a TensorDictModule, an nn.Module or another callable, got the class "
            f"{policy.__name__}: make one of it, or give it as policy_factory"
        )
    if isinstance(policy, RandomPolicy):
        return RandomActions(policy.action_spec, policy.action_key)
    if isinstance(getattr(policy, "__self__", None), EnvBase) and policy.__name__ in _RANDOM:
        return RandomActions()
    if isinstance(policy, TensorDictModuleBase):
        return policy
    module = policy if isinstance(policy, nn.Module) else None
    if module is not None and isinstance(getattr(module, "module", None), TensorDictModuleBase):
        raise TypeError(
            f"the policy is a {type(module).__name__} around a policy: give the one within, its "
            ".module"
        )
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        if module is not None:
            return module  # compiled, or wrapped
        _refuse_hidden_modules(policy)
        return OnTensorDicts(policy, policy.in_keys, policy.out_keys)
    if not callable(policy):
        raise TypeError(
            f"policy must be a TensorDictModule, an nn.Module or another callable, got a "
            f"{type(policy).__name__}"
        )
    if module is None:
        policy = uncompiled(policy)
        _refuse_hidden_modules(policy)
    call = policy if module is None else module.forward
    if trust_policy or _takes_tensordicts(call):
        return OnTensorDicts(policy)
    if module is not None:
        return module
    names = list(required_parameters(call))
    return TensorDictModule(
        _OnRows(policy), in_keys=names if len(names) > 1 else ["observation"], out_keys=["action"]
    )


def transforms_of(policy: nn.Module) -> list[Transform]:
    """What a TorchRL environment needs for a recurrent policy: its primers, and ``is_init``."""
    primer = get_primers_from_module(policy, warn=False)
    return [] if primer is None else [InitTracker(), primer]


def required_parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Those that must be given."""
    try:
        found = inspect.signature(call).parameters
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the parameters of the policy, {call!r}, can't be found out: wrap it as "
            "TensorDictModule(policy, in_keys=[...], out_keys=['action'])"
        ) from error
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: parameter
        for name, parameter in found.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in several
    }


def _takes_tensordicts(call: Callable[..., Any]) -> bool:
    parameters = [*required_parameters(call).values()]
    if not parameters:  # such as of ``def policy(td=None)``
        parameters = [*inspect.signature(call).parameters.values()][:1]
    if len(parameters) != 1:
        return False
    (parameter,) = parameters
    name = parameter.name
    kind = parameter.annotation
    annotated = isinstance(kind, type) and issubclass(kind, TensorDictBase)
    return annotated or name in ("tensordict", "td") or kind in ("TensorDict", "TensorDictBase")


def _refuse_hidden_modules(policy: Any) -> None:
    """Learning would not reach the copies of modules that actors get inside of a function.

    Used or not: a trial need not come to where a function uses one.
    """
    for name, network in networks_in(policy, "policy"):
        raise TypeError(
            f"the policy is a {type(policy).__name__} that uses a module ({name}, a "
            f"{type(network).__name__}), whose parameters the collector can't follow: pass the "
            "module itself, as TensorDictModule(module, in_keys=['observation'], "
            "out_keys=['action'])"
        )
