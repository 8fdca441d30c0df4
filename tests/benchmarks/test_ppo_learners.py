"""The learners of recipes that a benchmark gives the batches of TorchRL's collectors too."""

from __future__ import annotations

from functools import partial

import pytest
import script_paths  # noqa: F401  so that the benchmarks are found
import torch
from _ppo_learners import control_learner
from normalisation import by_torchrl
from torchrl.collectors import Collector
from torchrl.envs import SerialEnv

from torchrl_hts import RunningNorm, World


@pytest.mark.parametrize("normalises", [True, False])
def test_a_learner_learns_from_a_stock_collectors_batch(normalises: bool) -> None:
    torch.manual_seed(0)
    with World(threads=1) as world:
        learner = control_learner(
            "Pendulum-v1",
            world,
            lag=None,
            normalises_observations=normalises,
            normalises_rewards=normalises,
            num_envs=2,
        )
        norms = [part for part in learner.policy.modules() if isinstance(part, RunningNorm)]
        assert bool(norms) == normalises
        make_env = partial(SerialEnv, 2, partial(by_torchrl, "Pendulum-v1"))
        collector = Collector(make_env, learner.policy, frames_per_batch=128, total_frames=128)
        (batch,) = collector
        collector.shutdown()
        before = [value.clone() for value in learner.loss_module.parameters()]
        learner.learn(batch)
        after = [*learner.loss_module.parameters()]
    changed = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert all(changed)
    assert not normalises or norms[0].mean.abs().sum() > 0
