"""Actions at random, as TorchRL's ``RandomPolicy`` draws them.

Axes: m rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torchrl.data import Composite, TensorSpec
from torchrl.modules import MaskedCategorical, MaskedOneHotCategorical

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._planning.action_checks import action_sizes
from torchrl_hts._planning.fitted import Description, Fitted
from torchrl_hts._rounds.keys import Key, as_path, as_written
from torchrl_hts._rounds.shared_memory import Field
from torchrl_hts.errors import PolicyError

__all__ = ["RandomActions", "reads_masks"]

_MASKED = (MaskedCategorical, MaskedOneHotCategorical)


class RandomActions(Fitted):
    """Draws actions from the action space, as TorchRL's ``RandomPolicy`` does.

    Args:
        spec: of the actions, without batch dimensions; None for that of the environment.
        key: of the action, unless the spec is a Composite.
        advice: what to do where actions are masked.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Categorical
        >>> policy = RandomActions(Categorical(3))
        >>> policy(TensorDict({}, [5]))["action"].shape
        torch.Size([5])
    """

    def __init__(
        self,
        spec: TensorSpec | None = None,
        key: Any = "action",
        advice: str = "give a policy that reads the mask, with MaskedCategorical",
    ) -> None:
        super().__init__()
        self._advice = advice
        self.in_keys: list[Any] = []
        self.out_keys: list[Any] = []
        self._space: gym.Space[Any] | None = None
        self._spec: Composite | None = None
        self._asked = False
        self._fields: dict[Key, Field] = {}
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

    def write_as(self, fields: Iterable[Field]) -> None:
        """Write actions of other shapes and types from now on, as another policy does.

        Args:
            fields: of a batch, those of the actions among them.
        """
        self._fields = {field.key: field for field in fields}

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
            f"random actions would ignore the mask of {of}, which changes from step to step: "
            f"{self._advice}"
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action for each row."""
        rows = tuple(tensordict.batch_size)
        spaces: dict[Key, Any] = {}
        if self._spec is not None:
            drawn = {as_path(k): v for k, v in self._spec.rand(rows).items(True, True)}
        else:
            spaces = dict(_leaves(("action",), self._space))
            drawn = {key: _draw(space, rows) for key, space in spaces.items()}
        for key, value in drawn.items():
            field = self._fields.get(key)
            if field is not None:
                value = _in_form(value, field, spaces.get(key))
            tensordict[as_written(key)] = value
        return tensordict


def reads_masks(policy: nn.Module) -> bool:
    """Whether some of a policy's modules draw or choose by a mask that they are given."""
    for module in policy.modules():
        if getattr(module, "action_mask_key", None) is not None:
            return True
        kwargs = getattr(module, "distribution_kwargs", None) or {}
        kinds = [getattr(module, "distribution_class", None)]
        kinds += dict(kwargs.get("distribution_map") or {}).values()  # of a CompositeDistribution
        for kind in kinds:
            while isinstance(kind, partial):
                kind = kind.func
            if isinstance(kind, type) and issubclass(kind, _MASKED):
                return True
    return False


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


def _in_form(drawn: Tensor, field: Field, space: Any) -> Tensor:
    """Elements of a space ``[m, ...]`` as a field holds them: indices, or one-hot.

    Args:
        space: None for actions of a TorchRL environment, whose spec says the shape.
    """
    rows = drawn.shape[0]
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        sizes = np.atleast_1d(
            space.nvec if isinstance(space, gym.spaces.MultiDiscrete) else space.n
        )
        if prod(field.shape) != sizes.size:
            columns = drawn.reshape(rows, -1).unbind(1)
            hot = [one_hot(c, int(n)) for c, n in zip(columns, sizes.ravel(), strict=True)]
            drawn = torch.cat(hot, 1)
    return drawn.reshape(rows, *field.shape).to(getattr(torch, field.dtype))
