"""Measuring what the parts of a user's workload cost, each alone (see ``forecast.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ConvNet, NormalParamExtractor, ProbabilisticActor, TanhNormal

from torchrl_hts._executor.background_env import overlaps
from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.torchrl_env import TorchRLDescription, TorchRLEnvironment
from torchrl_hts._executor.torchrl_play import TorchRLPlay
from torchrl_hts._executor.trial_observations import gym_observations
from torchrl_hts._executor.vector_play import VectorPlay
from torchrl_hts._planning.batch_plan import plan_batch
from torchrl_hts._planning.costs import PassCosts
from torchrl_hts._planning.fitted import Fitted
from torchrl_hts._planning.pass_times import median_cpu_time, time_passes
from torchrl_hts._planning.pickling import pickle_policy
from torchrl_hts._planning.probe import EnvironmentTimes, GymPlay, time_steps
from torchrl_hts._planning.torch_defaults import torchs_defaults
from torchrl_hts._processes.messages import unpickled
from torchrl_hts.collector import HTSCollector

__all__ = [
    "MakeEnv",
    "Trial",
    "default_policy",
    "measure_environment",
    "measure_learning",
    "measure_passes",
    "run_trial",
]

MakeEnv = Callable[[], Any]  # a gymnasium.Env, a VectorEnv, or a TorchRL EnvBase

_MIN_STEPS = 200
_WARM_UP = 10
_LEARNING_ROWS = 256
_WIDTH = 64
_IMAGE_SIZE = 36  # the least that the Nature CNN's layers leave something of


def measure_environment(make_env: MakeEnv, seconds: float) -> EnvironmentTimes:
    """Play an environment at random and time each step and each reset apart.

    Args:
        make_env: makes the environment, or a batch of them, which is closed in the end.
        seconds: for how long; but for 200 steps at least.
    """
    env = make_env()
    try:
        times = time_steps(_play(env), seconds, least=_MIN_STEPS, warm_up=_WARM_UP)
        return replace(times, overlaps=overlaps(env))
    finally:
        env.close()


def _play(env: Any) -> VectorPlay | GymPlay | TorchRLPlay:
    if isinstance(env, EnvBase):
        return TorchRLPlay(env)
    return VectorPlay(env) if isinstance(env, gym.vector.VectorEnv) else GymPlay(env)


def default_policy(env: Any) -> TensorDictModuleBase:
    """A policy such as many would begin with: the Nature CNN on images, else a small MLP.

    Args:
        env: an environment, or a batch of them.

    Raises:
        TypeError: for spaces that it has no network for; the message says what to do.
    """
    if isinstance(env, EnvBase):
        raise TypeError(
            "there is no default policy for TorchRL environments: name one with --policy "
            "module:function"
        )
    is_batch = isinstance(env, gym.vector.VectorEnv)
    observations = env.single_observation_space if is_batch else env.observation_space
    actions = env.single_action_space if is_batch else env.action_space
    if isinstance(observations, gym.spaces.Dict | gym.spaces.Tuple) or not observations.shape:
        raise TypeError(
            f"there is no default policy for the observation space {observations}: name one with "
            "--policy module:function"
        )
    shape = observations.shape
    if isinstance(actions, gym.spaces.Discrete):
        width, head = int(actions.n), None
    elif isinstance(actions, gym.spaces.Box) and np.issubdtype(actions.dtype, np.floating):
        width, head = 2 * int(np.prod(actions.shape)), NormalParamExtractor()
    else:
        raise TypeError(
            f"there is no default policy for the action space {actions}: name one with --policy "
            "module:function"
        )
    if len(shape) == 3 and sorted(shape)[1] >= _IMAGE_SIZE:
        channels_last = shape[2] == min(shape)
        channels = shape[2] if channels_last else shape[0]
        conv = ConvNet(channels, num_cells=[32, 64, 64], kernel_sizes=[8, 4, 3], strides=[4, 2, 1])
        front: nn.Module = nn.Sequential(_Pixels(channels_last), conv)
        features = front(torch.zeros(1, *shape)).shape[-1]
        body = nn.Sequential(front, nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, width))
    else:
        body = MLP(int(np.prod(shape)), width, num_cells=[_WIDTH, _WIDTH])
        if len(shape) > 1 or observations.dtype != np.float32:
            body = nn.Sequential(_Flat(len(shape)), body)
    net = body if head is None else nn.Sequential(body, head)
    if isinstance(actions, gym.spaces.Discrete):
        return ProbabilisticActor(
            TensorDictModule(net, ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


class _Pixels(nn.Module):
    """Images to floats in [0, 1], channels first."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last

    def forward(self, pixels: Tensor) -> Tensor:
        if self.channels_last:
            pixels = pixels.movedim(-1, -3)
        return pixels.float() / 255


class _Flat(nn.Module):
    """Flat floats."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, observation: Tensor) -> Tensor:
        return observation.float().flatten(-self.axes)


def measure_passes(
    make_env: MakeEnv,
    policy: TensorDictModuleBase,
    rows: Sequence[int],
    seconds: float,
) -> PassCosts:
    """What forward passes of so many rows cost, as actors run them.

    Args:
        make_env: says what observations look like.
        policy: is run on random ones, and samples.
        rows: of a pass, ascending from 1.
        seconds: in all.
    """
    own, examples = _to_run(make_env, policy, max(rows))
    return time_passes(own, examples, rows, seconds)


def measure_learning(make_env: MakeEnv, policy: TensorDictModuleBase, seconds: float) -> float:
    """Processor time of a pass forward and back for each row, in batches of 256 on one thread.

    0.0 if the policy's outputs have no gradient.
    """
    own, examples = _to_run(make_env, policy, _LEARNING_ROWS)
    batch = examples[:_LEARNING_ROWS]

    def learn() -> bool:
        with torch.enable_grad(), set_exploration_type(ExplorationType.RANDOM):
            written = own(batch.clone(False))
            terms = [v.sum() for v in written.values(True, True) if v.requires_grad]
            if terms:
                torch.autograd.backward(torch.stack(terms).sum())
        own.zero_grad()
        return bool(terms)

    return median_cpu_time(learn, seconds) / len(batch) if learn() else 0.0


@torchs_defaults()
def _to_run(
    make_env: MakeEnv, policy: TensorDictModuleBase, rows: int
) -> tuple[TensorDictModuleBase, TensorDictBase]:
    """A copy of the policy on the CPU, which running it may change, and inputs for it."""
    own: TensorDictModuleBase = unpickled(pickle_policy(policy))
    env = make_env()
    try:
        if isinstance(env, EnvBase):
            made = TorchRLEnvironment(env, 0)
            description: GymDescription | TorchRLDescription = replace(
                made.description, observations=made.observations()
            )
        elif isinstance(env, gym.vector.VectorEnv):
            play = VectorPlay(env)
            play.reset()
            description = replace(play.description, observations=play.observations())
        else:
            seen = gym_observations(env)
            description = GymDescription(env.observation_space, env.action_space, seen)
    finally:
        env.close()
    if isinstance(own, Fitted):
        own.fit(description)
    plan = plan_batch(
        description,
        own,
        rows,
        exploration_type=ExplorationType.RANDOM,
        max_frames_per_traj=0,
        compact_obs=False,
    )
    return own, plan.examples


@dataclass(frozen=True)
class Trial:
    """What a short run of the collector itself gave.

    Attributes:
        steps_per_second: with a learner that does nothing.
        executor_cpu_s: processor time of executors for each step.
        actor_cpu_s: processor time of actors for each pass.
        rows: mean rows of a pass.
    """

    steps_per_second: float
    executor_cpu_s: float
    actor_cpu_s: float
    rows: float


def run_trial(
    make_env: MakeEnv,
    policy: TensorDictModuleBase,
    seconds: float,
    **settings: Any,
) -> Trial:
    """Run `HTSCollector` and throw away what it collects.

    Args:
        make_env: makes each environment, or batch of them.
        policy: acts.
        seconds: for how long, from the second round on.
        **settings: of `HTSCollector`, ``frames_per_batch`` among them, and ``num_envs``, how many
            of what `make_env` makes.
    """
    factories = [make_env] * settings.pop("num_envs")
    with HTSCollector(factories, policy, seed=0, **settings) as collector:
        batches = iter(collector)
        for _ in range(2):
            next(batches)
        before, began, frames = collector.statistics(), time.perf_counter(), 0
        while not frames or time.perf_counter() - began < seconds:
            frames += next(batches).numel()
        elapsed_s, after = time.perf_counter() - began, collector.statistics()

    def used(kind: str) -> tuple[float, int]:
        pairs = [
            (after.workers[name], before.workers[name]) for name in after.workers if kind in name
        ]
        return sum(a.cpu_s - b.cpu_s for a, b in pairs), sum(a.events - b.events for a, b in pairs)

    (stepping_s, steps), (inferring_s, passes) = used("executor"), used("actor")
    return Trial(
        frames / elapsed_s, stepping_s / max(steps, 1), inferring_s / max(passes, 1),
        steps / max(passes, 1),
    )  # fmt: skip
