"""First values of what a policy reads back: what primers give where an episode starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import TensorSpec
from torchrl.envs import Compose, EnvBase, TensorDictPrimer, TransformedEnv
from torchrl.modules.utils import get_primers_from_module

from torchrl_hts._rounds.keys import Key, as_path, as_written

__all__ = ["first_value", "primed_keys", "primer_specs"]


def primed_keys(env: EnvBase) -> Iterable[Key]:
    """Keys that a primer among an environment's transforms sets at a reset.

    It hands them on at each step, as the policy leaves them.
    """
    while isinstance(env, TransformedEnv):
        for primer in _primers(env.transform):
            yield from map(as_path, primer.primers.keys(True, True))
        env = env.base_env


def primer_specs(policy: TensorDictModuleBase) -> dict[Key, tuple[TensorDictPrimer, TensorSpec]]:
    """By key, the primer that a module of the policy offers, and the spec of what it sets."""
    return {
        as_path(key): (primer, spec)
        for primer in _primers(get_primers_from_module(policy, warn=False))
        for key, spec in primer.primers.items(True, True)
    }


def first_value(primer: TensorDictPrimer, key: Key) -> float:
    """What a primer sets an entry to, in a gymnasium environment.

    Raises:
        ValueError: if it is drawn, or computed, or not the same for all elements.
    """
    value = None if primer.random or primer.single_default_value else primer.default_value
    if value is not None:
        value = value[as_written(key)]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise ValueError(
            f"the policy's primer draws or computes the first value of {key}; with gymnasium "
            "environments HTSCollector starts an episode with one number for all elements. Give "
            "create_env_fn a TorchRL environment with the primer among its transforms"
        )
    return float(value)


def _primers(transform: Any) -> Iterable[TensorDictPrimer]:
    """The primers in a transform that may be a composition of others, or None."""
    if isinstance(transform, Compose):
        for part in transform.transforms:
            yield from _primers(part)
    elif isinstance(transform, TensorDictPrimer):
        yield transform
