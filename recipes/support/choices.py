"""What a policy chose from at each step: probabilities of actions, or their mean and deviation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, nn

__all__ = ["Choices", "choices"]

# "probability"; or "mean" and "deviation"; or, of what has neither, the "middle". Each [T, A].
Choices = dict[str, Tensor]


def choices(policy: nn.Module, values: Mapping[str, Tensor], observed: TensorDictBase) -> Choices:
    """What a policy with given values chose from.

    Args:
        policy: takes the values on.
        values: its parameters and buffers by name.
        observed: ``[T]``, what it read, as a batch has it.

    Returns:
        Nothing of a policy that has no distribution, or one that has none of these.
    """
    policy.load_state_dict(dict(values), strict=False)
    parts = [m for m in policy.modules() if isinstance(m, ProbabilisticTensorDictModule)]
    found: Choices = {}

    def look(module: ProbabilisticTensorDictModule, arguments: tuple[TensorDictBase, ...]) -> None:
        distribution = module.get_dist(arguments[0])
        for name, attribute in (
            ("probability", "probs"),
            ("mean", "mean"),
            ("deviation", "stddev"),
            ("middle", "deterministic_sample"),
        ):
            value = None
            try:
                value = getattr(distribution, attribute, None)
            except (NotImplementedError, RuntimeError):
                continue
            if isinstance(value, Tensor):
                found[name] = value.detach().reshape(len(observed), -1)
            if {"probability", "mean"} & found.keys() and name != "mean":
                break

    handles = [part.register_forward_pre_hook(look) for part in parts]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # the training goes on after it
            policy(observed.select(*policy.in_keys).clone())
    finally:
        for handle in handles:
            handle.remove()
    return found
