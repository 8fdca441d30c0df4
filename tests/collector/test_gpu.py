"""What only a machine with a GPU can show; elsewhere these tests are skipped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from policies import categorical
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import GymEnv
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal

from torchrl_hts import DelayedGradient, Evaluator, HTSCollector
from torchrl_hts.testing import TASKS, digest, train

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: there is none"),
]

CartPole = partial(gym.make, "CartPole-v1")
CORNERS = [(1, 1, False), (2, 2, True), (4, 8, True)]


def on_gpu(**arguments: Any) -> HTSCollector:
    """A small run whose policy and batches are on the GPU."""
    arguments = {"policy_device": "cuda", "storing_device": "cuda", "seed": 0} | arguments
    policy = arguments.pop("policy", None) or categorical(num_actions=2).to("cuda")
    return HTSCollector([CartPole] * 4, policy, frames_per_batch=20, **arguments)


@pytest.mark.parametrize("task", ["cartpole", "continuous", "lstm", "pong"])
def test_i7_batches_and_parameters_are_equal_bit_for_bit(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if task == "pong":
        pytest.importorskip("ale_py")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        run = partial(train, TASKS[task], rounds=3, device="cuda", policy_device="cuda")
        runs = [run(num_actors=a, num_executors=e, delays=d) for a, e, d in CORNERS]
        other = run(num_actors=1, num_executors=2, delays=False, seed=1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0] == runs[1] == runs[2]
    assert not set(other) & set(runs[0]), "another seed must differ in everything"


def test_a_gpus_actions_are_those_of_the_cpu_but_for_rounding() -> None:
    batches = []
    for device in ("cpu", "cuda"):
        with on_gpu(policy_device=device) as collector:
            batches.append(next(iter(collector)))
    on_cpu, on_cuda = batches
    assert on_cuda["logits"].device.type == "cuda"
    torch.testing.assert_close(on_cuda["logits"][:, 0], on_cpu["logits"][:, 0])
    torch.testing.assert_close(on_cuda["action_log_prob"][:, 0], on_cpu["action_log_prob"][:, 0])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_delayed_update_is_that_of_the_cpu_but_for_rounding(lag: int) -> None:
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        delayed = DelayedGradient(net, lag=lag)
        for step in range(6):
            with delayed:
                inputs = torch.full((1, 3), float(step), device=device)
                net(inputs).square().sum().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        found.append(net.weight.detach().cpu())
    torch.testing.assert_close(*found)


def test_a_run_goes_on_from_its_state_bit_for_bit() -> None:
    with on_gpu() as collector:
        batches = iter(collector)
        next(batches)
        state = collector.state_dict()
        expected = [digest(next(batches)) for _ in range(3)]
    with on_gpu() as collector:
        collector.load_state_dict(state)
        batches = iter(collector)
        assert [digest(next(batches)) for _ in range(3)] == expected


def test_weights_from_the_cpu_can_be_staged() -> None:
    policy = categorical(num_actions=2).to("cuda")
    weights = {name: torch.zeros_like(p, device="cpu") for name, p in policy.named_parameters()}
    with on_gpu(policy=policy, lag=0) as collector:
        batches = iter(collector)
        assert next(batches)["logits"].any()
        collector.update_policy_weights_(weights)
        assert not next(batches)["logits"].any()


def test_environments_may_compute_on_the_gpu() -> None:
    make_env = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    policy = categorical(num_actions=2)
    with HTSCollector(
        [make_env] * 2, policy, frames_per_batch=20, device="cuda", seed=0, total_frames=40
    ) as collector:
        batches = list(collector)
    assert [batch["observation"].device.type for batch in batches] == ["cuda"] * 2


def test_bounds_of_actions_may_lie_on_the_gpu() -> None:
    net = nn.Sequential(MLP(3, 2, num_cells=[16]), NormalParamExtractor())
    low, high = (torch.full((1,), bound, device="cuda") for bound in (-2.0, 2.0))
    policy = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": low, "high": high},
        return_log_prob=True,
    ).to("cuda")
    with HTSCollector(
        [partial(gym.make, "Pendulum-v1")] * 2, policy, frames_per_batch=20, device="cuda", seed=0
    ) as collector:
        actions = next(iter(collector))["action"]
    assert actions.abs().max() <= 2


@pytest.mark.parametrize("kind", ["split_trajs", "set_truncated", "return_same_td"])
def test_batches_on_the_gpu_take_every_form(kind: str) -> None:
    with on_gpu(**{kind: True}, max_frames_per_traj=3) as collector:
        batch = next(iter(collector))
    assert batch["next", "truncated"].any()


def test_an_evaluator_plays_on_the_cpu() -> None:
    with Evaluator(CartPole, categorical(num_actions=2).to("cuda"), num_episodes=2) as evaluator:
        evaluator.submit(0)
        (evaluation,) = evaluator.wait()
    assert len(evaluation.returns) == 2


def test_an_actor_that_dies_is_replaced() -> None:
    def run(between: Callable[[HTSCollector], None]) -> list[str]:
        with on_gpu(on_executor_failure="restart") as collector:
            batches = iter(collector)
            found = [digest(next(batches))]
            between(collector)
            return [*found, *(digest(next(batches)) for _ in range(3))]

    def kill(collector: HTSCollector) -> None:
        os.kill(collector.worker_pids()["actor 0"], signal.SIGKILL)

    with pytest.warns(Warning, match="actor 0"):
        killed = run(kill)
    assert killed == run(lambda collector: None)


def test_what_comes_after_a_draw_reads_it_on_the_gpu() -> None:
    policy = TensorDictSequential(
        categorical(num_actions=2),
        TensorDictModule(Doubled(), ["action", "logits"], ["doubled"]),
    ).to("cuda")
    with on_gpu(policy=policy) as collector:
        batch = next(iter(collector))
    assert torch.equal(batch["doubled"], 2.0 * batch["action"])


class Doubled(nn.Module):
    """Fails where its inputs are on two devices."""

    def forward(self, action: Tensor, logits: Tensor) -> Tensor:
        return 2 * action + 0 * logits[..., 0]
