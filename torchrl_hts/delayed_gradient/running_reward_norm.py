"""`RunningRewardNorm`: rewards divided by the running deviation of the discounted return."""

# Axes: N environments of all learners, n of one part, T steps of one batch.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_hts.delayed_gradient.moments import RunningMoments, parts_of, world_of
from torchrl_hts.delayed_gradient.trainer import check_is_trainer
from torchrl_hts.errors.checks import check_integer, check_number, check_positive

if TYPE_CHECKING:
    from torchrl.trainers import Trainer

    from torchrl_hts._world.world import World

__all__ = ["RunningRewardNorm"]


class RunningRewardNorm(RunningMoments):
    """Scales rewards as gymnasium's `NormalizeReward` does, but in the learner, batch by batch.

    Each environment has a return that runs along, ``R = gamma R (1 - terminated) + r``. A batch's
    rewards are divided by ``sqrt(var + eps)``, with the variance of all R until its end, and
    clipped. Statistics are those of all environments together, where a wrapper counts its own.

    A module, whose ``state_dict`` holds the statistics and the return of each environment; put it
    into checkpoints. It is the same on every learner.

    Args:
        num_envs: N.
        gamma: the discount that is trained with.
        eps: added to the variance.
        clip: results are cut at this, both ways.

    Attributes:
        returns: R of each environment after its last step, ``[N]``, float64.

    Raises:
        TypeError, ValueError: if an argument makes no sense.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> rewards = RunningRewardNorm(1, gamma=0.5)
        >>> steps = {"reward": torch.tensor([[[2.0], [2.0]]]), "terminated": torch.zeros(1, 2, 1)}
        >>> batch = TensorDict({"next": TensorDict(steps, [1, 2])}, [1, 2])
        >>> rewards.normalize_(batch)  # R is 2 and 3, so their deviation 1/2
        >>> batch["next", "reward"].flatten(), rewards.returns
        (tensor([4., 4.]), tensor([3.], dtype=torch.float64))
    """

    returns: Tensor

    def __init__(
        self, num_envs: int, *, gamma: float = 0.99, eps: float = 1e-8, clip: float = 10.0
    ) -> None:
        super().__init__([])
        check_positive(eps=eps, clip=clip)
        if not 0 <= check_number("gamma", gamma) <= 1:
            raise ValueError(f"gamma must be between 0 and 1, got {gamma!r}")
        self.gamma, self.eps, self.clip = float(gamma), float(eps), float(clip)
        num_envs = check_integer("num_envs", num_envs)
        self.register_buffer("returns", torch.zeros(num_envs, dtype=torch.float64))

    @torch.no_grad()
    def normalize_(
        self, data: TensorDictBase | Sequence[TensorDictBase], world: World | None = None
    ) -> None:
        """Count a batch's rewards, and scale them in place. Once for each batch, in order.

        Args:
            data: a batch ``[N, T]`` of whole rounds, or the parts that `World.parts` has cut. With
                one environment ``[T]`` too.
            world: the learners.

        Raises:
            TypeError: if it is no batch, and no list of parts.
            ValueError: if the batch isn't of so many environments, or was split into trajectories,
                rewards are no floats, or one is infinite.
        """
        parts = parts_of(data, world)
        if len(self.returns) == 1:
            parts = [part.unsqueeze(0) if part.ndim == 1 else part for part in parts]
        if not all(part["next", "reward"].is_floating_point() for part in parts):
            raise ValueError(
                "rewards are scaled in place and must be floats, got "
                f"{parts[0]['next', 'reward'].dtype}: write batch['next', 'reward'] as float first"
            )
        if any(part.get(("collector", "mask"), None) is not None for part in parts):
            raise ValueError(
                "rewards are scaled along the steps of each environment: scale them in the batch "
                "of a whole round, before it is split into trajectories"
            )
        size, rank = (1, 0) if world is None else (world.size, world.rank)
        own = sum(len(part) for part in parts)
        if own * size != len(self.returns):
            raise ValueError(
                f"expected a batch of {len(self.returns) // size} environments, got {own}: "
                "num_envs is the number of all learners' environments"
            )
        start, found = rank * own, []
        for part in parts:
            before = self.returns[start : start + len(part)]
            found.append(_run_along(part, before, self.gamma))
            start += len(part)
        self.take_in([each.flatten() for each in found], world, "rewards")
        after = torch.cat([each[:, -1] for each in found])
        self.returns.copy_(after if world is None else torch.cat(world.gather(after)))
        scale = torch.sqrt(self.var + self.eps)
        for part in parts:
            reward = part["next", "reward"]
            scaled = reward.to(torch.float64) / scale.to(reward.device)
            reward.copy_(scaled.clamp(-self.clip, self.clip))

    def register(self, trainer: Trainer, name: str = "running_reward_norm") -> None:
        """Have `trainer` scale every batch's rewards before it trains, and save the statistics.

        It is a hook of ``batch_process``. What those that are registered later see, and what the
        trainer logs as rewards, is scaled.

        Args:
            trainer: of one learner, or of several.
            name: under which the trainer saves the statistics.

        Raises:
            TypeError: if it is no trainer.
            RuntimeError: if the trainer has such a hook already.
        """
        check_is_trainer(trainer)

        def scale(batch: TensorDictBase) -> TensorDictBase:
            self.normalize_(batch, world_of(trainer))
            return batch

        if any(isinstance(module, RunningRewardNorm) for module in trainer._modules.values()):
            raise RuntimeError("the trainer has a RunningRewardNorm already: one is enough")
        trainer.register_module(name, self)
        trainer.register_op("batch_process", scale)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{len(self.returns)}, gamma={self.gamma}, eps={self.eps}, clip={self.clip}"


def _run_along(part: TensorDictBase, before: Tensor, gamma: float) -> Tensor:
    """R after each step of a part, ``[n, T]``, on the CPU.

    Args:
        part: ``[n, T]``.
        before: R before it, ``[n]``.
        gamma: the discount.
    """
    rewards, terminated = (
        part["next", name].squeeze(-1).cpu() for name in ("reward", "terminated")
    )
    if rewards.shape != part.shape or rewards.ndim != 2:
        raise ValueError(
            f"expected one reward for each of the steps {tuple(part.shape)} of a batch [N, T], got "
            f"{tuple(rewards.shape)}"
        )
    discounts = (gamma * (1.0 - terminated.to(torch.float64))).numpy()
    returns = rewards.to(torch.float64).numpy().copy()
    now = before.cpu().numpy()
    for t in range(returns.shape[1]):  # a step costs numpy less than torch
        now = returns[:, t] = now * discounts[:, t] + returns[:, t]
    return torch.from_numpy(returns)
