"""RunningNorm and RunningRewardNorm in a run: theta_j acts, for any workers, and is resumed."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, NormalParamExtractor, ProbabilisticActor
from torchrl.trainers import Trainer, UpdateWeights

from torchrl_hts import DelayedGradient, HTSCollector, RunningNorm, RunningRewardNorm
from torchrl_hts.testing import digest

pytestmark = pytest.mark.usefixtures("nothing_left")

ENVS, ALPHA, ROUNDS = 3, 5, 7


class Training:
    """Learns Pendulum by a policy gradient, with statistics of observations and rewards."""

    def __init__(self, lag: int, seed: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.norm = RunningNorm(3)
        self.rewards = RunningRewardNorm(ENVS, gamma=0.9)
        net = nn.Sequential(self.norm, nn.Linear(3, 2), NormalParamExtractor())
        self.policy = ProbabilisticActor(
            TensorDictModule(net, ["observation"], ["loc", "scale"]),
            ["loc", "scale"],
            distribution_class=IndependentNormal,
            return_log_prob=True,
        )
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.03)
        self.delayed = DelayedGradient(self.policy, lag=lag)
        self.collector = HTSCollector(
            [partial(gym.make, "Pendulum-v1")] * ENVS,
            self.policy,
            frames_per_batch=ENVS * ALPHA,
            total_frames=ENVS * ALPHA * ROUNDS,
            lag=lag,
            seed=seed,
            **options,
        )

    def step(self, batch: TensorDictBase) -> str:
        """One update; returns a digest of the batch, and of all that came of it."""
        seen = digest(batch)
        self.rewards.normalize_(batch)
        with self.delayed(batch):
            log_prob = self.policy.get_dist(batch.clone()).log_prob(batch["action"])
            torch.testing.assert_close(log_prob, batch["action_log_prob"])  # of theta_j
            (log_prob * batch["next", "reward"].squeeze(-1)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.norm.update(batch)
        self.collector.update_policy_weights_()
        return seen + digest([*self.policy.state_dict().values(), *self.rewards.buffers()])

    def parts(self) -> list[Any]:
        return [self.collector, self.policy, self.rewards, self.optimizer, self.delayed]

    def state(self) -> Any:
        file = io.BytesIO()  # the way that a checkpoint takes
        torch.save([part.state_dict() for part in self.parts()], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, state: Any) -> None:
        for part, own in zip(self.parts(), state, strict=True):
            part.load_state_dict(own)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_i7_statistics_are_theta_js_for_any_workers_and_resumed(lag: int) -> None:
    whole = Training(lag, num_executors=1)
    with whole.collector as data:
        expected = [whole.step(batch) for batch in data]
    first = Training(lag, num_executors=3, num_actors=2)
    states = []
    with first.collector as data:
        for j, batch in enumerate(data):
            assert first.step(batch) == expected[j]
            states.append(first.state())
    resumed = Training(lag, num_executors=2, seed=99)
    with resumed.collector as data:
        resumed.load(states[2])
        assert [resumed.step(batch) for batch in data] == expected[3:]


class Objective(nn.Module):
    """What `Training.step` minimises, as a trainer asks for it."""

    def __init__(self, policy: ProbabilisticActor) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: TensorDictBase) -> TensorDict:
        log_prob = self.policy.get_dist(batch.clone()).log_prob(batch["action"])
        return TensorDict({"loss": (log_prob * batch["next", "reward"].squeeze(-1)).mean()})


def make_trainer(training: Training) -> Trainer:
    return Trainer(
        collector=training.collector,
        total_frames=ENVS * ALPHA * ROUNDS,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=Objective(training.policy),
        optimizer=training.optimizer,
        clip_grad_norm=False,
        progress_bar=False,
    )


def test_a_trainer_with_both_registered_has_the_bits_of_the_loop() -> None:
    loop, trained = Training(1), Training(1)
    with loop.collector as data:
        for batch in data:
            loop.step(batch)
    trainer = make_trainer(trained)
    trainer.register_op("post_steps", UpdateWeights(trained.collector, 1))  # as trainers begin
    trained.rewards.register(trainer)
    trained.delayed.register(trainer)
    trained.norm.register(trainer)
    trainer.train()
    ends = [
        digest([*each.policy.state_dict().values(), *each.rewards.buffers()])
        for each in (loop, trained)
    ]
    assert ends[0] == ends[1]
    state = trainer.state_dict()
    for name, own in ("running_norm", trained.norm), ("running_reward_norm", trained.rewards):
        assert digest([*state[name].values()]) == digest([*own.buffers()])


@pytest.mark.parametrize(
    "hook", [DelayedGradient(nn.Linear(1, 1)), RunningNorm(3), RunningRewardNorm(1)]
)
def test_hooks_are_registered_with_trainers_alone(hook: Any) -> None:
    with pytest.raises(TypeError, match=r"register takes a trainer .* got Linear"):
        hook.register(nn.Linear(1, 1))


def test_delayed_gradient_is_registered_before_running_norm() -> None:
    training = Training(1)
    trainer = make_trainer(training)
    training.norm.register(trainer)
    with pytest.raises(RuntimeError, match="register DelayedGradient first"):
        training.delayed.register(trainer)
    training.collector.shutdown()
