"""What users pass as a policy besides modules on TensorDicts: nothing at all, and callables.

`as_module` makes a module of each. Those that must know the environment first are `Fitted` to it
once the executors have described it.

Axes: m rows of a batch.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from torchrl.envs import InitTracker, Transform
from torchrl.modules.tensordict_module.exploration import RandomPolicy
from torchrl.modules.utils import get_primers_from_module

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._executor.trial_observations import gym_reader
from torchrl_hts._planning.action_checks import action_sizes
from torchrl_hts._planning.policy_parts import networks_in
from torchrl_hts._policy.compiled import uncompiled
from torchrl_hts._rounds.keys import Key, as_written
from torchrl_hts.errors import PolicyError

__all__ = [
    "Fitted",
    "OnTensorDicts",
    "RandomActions",
    "as_module",
    "required_parameters",
    "transforms_of",
]

Description = GymDescription | TorchRLDescription

_ROWS = 4  # of a trial


class Fitted(TensorDictModuleBase):  # type: ignore[misc]  # tensordict has no types
    """A policy whose keys depend on the environment."""

    @abstractmethod
    def fit(self, description: Description) -> None:
        """Find `in_keys` and `out_keys` for such an environment; called before all else."""


class RandomActions(Fitted):
    """Draws actions from the action space, as TorchRL's ``RandomPolicy`` does.

    Args:
        spec: of the actions, without batch dimensions; None for that of the environment.
        key: of the action, unless the spec is a Composite.

    Example:
        >>> from torchrl.data import Categorical
        >>> policy = RandomActions(Categorical(3))
        >>> policy(TensorDict({}, [5]))["action"].shape
        torch.Size([5])
    """

    def __init__(self, spec: TensorSpec | None = None, key: Any = "action") -> None:
        super().__init__()
        self.in_keys: list[Any] = []
        self.out_keys: list[Any] = []
        self._space: gym.Space[Any] | None = None
        self._spec: Composite | None = None
        self._asked = False
        if spec is not None:
            self._use(spec if isinstance(spec, Composite) else Composite({key: spec}))

    def fit(self, description: Description) -> None:
        """Draw from the environment's action space, unless a spec was given.

        Raises:
            TypeError: if actions are masked, or of a kind of space that is not supported.
            PolicyError: if that can't be known before the environment has been observed.
        """
        if isinstance(description, TorchRLDescription):
            self._check_masks(description)
        if self.out_keys:
            return
        if isinstance(description, GymDescription):
            self._space = description.action_space
            leaves = [*_leaves(("action",), self._space)]
            for _, leaf in leaves:
                action_sizes(leaf)  # raises for what can't be drawn from
            self.out_keys = [as_written(key) for key, _ in leaves]
        else:
            self._use(description.specs["input_spec", "full_action_spec"])

    def _use(self, spec: Composite) -> None:
        masked = [
            key for key, leaf in spec.items(True, True) if getattr(leaf, "mask", None) is not None
        ]
        if masked:
            self._refuse_mask(repr(masked[0]))
        self._spec, self.out_keys = spec, list(spec.keys(True, True))

    def _check_masks(self, description: TorchRLDescription) -> None:
        """Some environments put a mask into the spec with each reset and step, and none before."""
        observed = description.observations
        if description.masks_actions or (observed is not None and observed.masks_actions):
            self._refuse_mask("the action")
        specs = description.specs["input_spec", "full_action_spec"].values(True, True)
        if observed is None and not self._asked and any(hasattr(s, "mask") for s in specs):
            self._asked = True  # once: not every environment can be observed
            raise PolicyError("whether its actions are masked is seen after a reset alone")

    def _refuse_mask(self, of: str) -> None:
        raise TypeError(
            f"random actions would ignore the mask of {of}, which changes from step to step: give "
            "a policy that reads the mask, with MaskedCategorical"
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action for each row."""
        if self._spec is not None:
            return tensordict.update(self._spec.rand(tensordict.batch_size))
        for key, space in _leaves(("action",), self._space):
            tensordict[key] = _draw(space, tuple(tensordict.batch_size))
        return tensordict


def _leaves(key: Key, space: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(space, gym.spaces.Dict):
        for name, child in space.spaces.items():
            yield from _leaves((*key, name), child)
    else:
        yield key, space


def _draw(space: Any, rows: tuple[int, ...]) -> Tensor:
    """Elements of a space, distributed as its own samples; indices count from 0."""
    if isinstance(space, gym.spaces.Discrete):
        return torch.randint(int(space.n), rows)
    if isinstance(space, gym.spaces.MultiDiscrete):
        share = torch.rand(*rows, *space.nvec.shape, dtype=torch.float64)
        return (share * torch.from_numpy(space.nvec.astype(np.float64))).long()
    if isinstance(space, gym.spaces.MultiBinary):
        return torch.randint(2, (*rows, *space.shape), dtype=torch.int8)
    low, high = (torch.from_numpy(bound.astype(np.float64)) for bound in (space.low, space.high))
    whole = space.dtype.kind in "iub"
    share = torch.rand(*rows, *space.shape, dtype=torch.float64)
    inside = low + (share * (high - low + 1)).floor() if whole else low + share * (high - low)
    # Where there is no bound: normal; beside a lone one: exponential.
    normal = torch.randn(*rows, *space.shape, dtype=torch.float64)
    above, below = torch.isfinite(low), torch.isfinite(high)  # there is a bound
    drawn = torch.where(above & below, inside, normal)
    if bool((above ^ below).any()):
        away = -torch.log1p(-torch.rand(*rows, *space.shape, dtype=torch.float64))
        drawn = torch.where(above & ~below, low + away, drawn)
        drawn = torch.where(below & ~above, high - away, drawn)
    if whole:
        drawn = drawn.floor()
    return torch.from_numpy(drawn.numpy().astype(space.dtype))


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
        policy: None or a ``RandomPolicy`` for random actions, a module, or a callable. One with a
            single parameter called ``tensordict`` or ``td``, or annotated as a TensorDict, is
            given TensorDicts; others tensors.
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
    parameters = required_parameters(call)
    if len(parameters) != 1:
        return False
    ((name, parameter),) = parameters.items()
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
