"""What the recipes that learn from pictures share: the collector and the networks."""

# Axes: N environments, T steps of one batch (alpha), C channels of one observation.

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from support.errors import RecipeError
from support.layers import orthogonal
from support.pixel_options import PixelOptions
from torchrl_hts import HTSCollector, World

__all__ = ["Agent", "NatureCNN", "encode", "make_collector", "on_device", "own_device"]


def make_collector(
    options: PixelOptions,
    make_env: Callable[[], gym.Env],
    policy: TensorDictModuleBase,
    world: World | None = None,
) -> HTSCollector:
    """Gathers whole rounds, as many as it takes for ``total_frames``, with all learners."""
    frames_per_batch = options.num_envs * options.sync_interval
    num_rounds = -(-options.total_frames // frames_per_batch)
    return HTSCollector(
        [make_env] * options.num_envs,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=num_rounds * frames_per_batch,
        num_actors=options.num_actors,
        num_executors=options.num_executors,
        lag=options.lag,
        seed=options.seed,
        world=world,
        storing_device=own_device(options.device),
        policy_device=own_device(options.policy_device),
        return_same_td=True,  # no batch is needed any more when the next is asked for
    )


class NatureCNN(nn.Module):
    """The trunk of Mnih et al. (2015): uint8 ``[..., C, H, W]`` to float32 ``[..., 512]``.

    Args:
        shape: ``C, H, W`` of an observation.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        channels, *size = shape
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            size = [(length - kernel) // stride + 1 for length in size]
        height, width = size
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * height * width, 512),
            nn.ReLU(),
        )
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                orthogonal(layer, 2**0.5)

    def forward(self, frames: Tensor) -> Tensor:
        pixels = frames.flatten(0, -4).float() / 255.0
        if torch.is_grad_enabled():  # in this order the pass back takes a fifth less on a CPU
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return self.layers(pixels).unflatten(0, frames.shape[:-3])


class Agent:
    """Actor and critic that share a trunk.

    Args:
        env: whose observations and discrete actions the agent has.
        trunk: observations to float32 features ``[..., width]``; by default the Nature CNN.
        width: number of features that it gives.

    Attributes:
        trunk: ``"observation"`` to ``"hidden"``.
        logits: ``"hidden"`` to ``"logits"``.
        actor_head: ``"hidden"`` to ``"logits"``, ``"action"`` and ``"action_log_prob"``.
        critic_head: ``"hidden"`` to ``"state_value"``.
        policy: trunk and actor's head.
        actor_critic: the same with the critic's head, whose values then are in the batch.
    """

    def __init__(self, env: gym.Env, trunk: nn.Module | None = None, width: int = 512) -> None:
        num_actions = int(env.action_space.n)
        if trunk is None:
            trunk = NatureCNN(env.observation_space.shape)
        self.trunk = TensorDictModule(trunk, in_keys=["observation"], out_keys=["hidden"])
        self.logits = TensorDictModule(
            orthogonal(nn.Linear(width, num_actions), 0.01), ["hidden"], ["logits"]
        )
        self.actor_head = ProbabilisticActor(
            self.logits,
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        self.critic_head = ValueOperator(orthogonal(nn.Linear(width, 1), 1.0), in_keys=["hidden"])
        self.policy = TensorDictSequential(self.trunk, self.actor_head).select_out_keys(
            "action", "action_log_prob"
        )
        self.actor_critic = TensorDictSequential(
            self.trunk, self.actor_head, self.critic_head
        ).select_out_keys("action", "action_log_prob", "state_value")

    def to(self, device: str) -> Agent:
        """Moves all parameters there; returns the agent."""
        self.actor_critic.to(device)
        return self

    def evaluate_next(self, batch: TensorDictBase) -> None:
        """Writes ``("next", "state_value")``, out of the values that the actors have computed.

        They computed them with the parameters that gathered the batch. Values that they have not
        computed, of what follows a row's last step, come from the parameters that are live.
        """
        batch["next", "state_value"] = _of_next(
            batch,
            batch["state_value"],
            lambda frames: self.critic_head.module(self.trunk.module(frames)),
        )


def own_device(device: str) -> str:
    """The device itself; of ``"cuda"`` a GPU for each learner of a machine, if there are some."""
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))  # torchrun's, srun's
    gpus = torch.cuda.device_count() if device == "cuda" and number else 0
    return f"cuda:{int(number or 0) % gpus}" if gpus else device


def on_device(agent: Agent, device: str) -> Agent:
    """Moves an agent to where it is learned, and has learning there repeat itself bit for bit.

    Raises:
        RecipeError: if there is no such device here.
    """
    try:
        agent.to(own_device(device))
    except (RuntimeError, AssertionError, ImportError) as error:
        raise RecipeError(f"--device {device} can't be used here: {error}") from error
    if device != "cpu":  # where gradients of convolutions are else summed up in any order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return agent


def encode(trunk: TensorDictModule, batch: TensorDictBase) -> None:
    """Writes ``"hidden"`` and ``("next", "hidden")``, each frame through the trunk once.

    Losses and GAE read those instead of the frames, where each would run the shared trunk for
    itself: four times forward and twice back.
    """
    trunk(batch)  # with gradients if they are enabled
    batch["next", "hidden"] = _of_next(batch, batch["hidden"].detach(), trunk.module)


@torch.no_grad()
def _of_next(batch: TensorDictBase, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function gives for each next observation, where its values for all others are known.

    A step's next observation is the observation of the step after it. So only the last step of each
    row, and steps that were cut off before their end, have a next observation to run. Where an
    episode has ended by itself GAE makes no use of the value of what follows.

    Args:
        batch: ``[N, T]``.
        values: ``[N, T, ...]``, of the observations.
        function: of frames ``[M, C, H, W]``.
    """
    shifted = values.roll(-1, dims=1)
    missing = batch["next", "truncated"].squeeze(-1).clone()  # [N, T]
    missing[:, -1] = True
    shifted[missing] = function(batch["next", "observation"][missing])
    return shifted
