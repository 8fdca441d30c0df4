"""What an actor does with a batch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv
from probe import inference_of
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import distributions as D
from torch import nn
from torchrl.envs.utils import ExplorationType
from torchrl.modules import ProbabilisticActor, ValueOperator

from torchrl_hts import HTSCollector, RunningNorm, WorkerError
from torchrl_hts._actor import calibration
from torchrl_hts._actor.batch_inference import BatchInference
from torchrl_hts._policy.counter_policy import CounterPolicy, inference
from torchrl_hts._policy.draws import CounterNoise
from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._policy.transposed_layers import is_transposed
from torchrl_hts._supervision.workers import Workers

BOX = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)


def drawing(width: int) -> ProbabilisticActor:
    """An action of three, drawn by a linear layer on "hidden"."""
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(width, 3), ["hidden"], ["logits"]),
        in_keys=["logits"],
        distribution_class=D.Categorical,
        return_log_prob=True,
    )


def dense() -> TensorDictSequential:
    """An actor and a critic of small dense layers, which are run in numpy."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU())
    return TensorDictSequential(
        TensorDictModule(trunk, ["observation"], ["hidden"]),
        drawing(32),
        ValueOperator(nn.Linear(32, 1), ["hidden"]),
    )


class Three(gym.ActionWrapper):  # type: ignore[type-arg]
    """Two actions by three."""

    def __init__(self, make: Any) -> None:
        super().__init__(make())
        self.action_space = gym.spaces.Discrete(3)

    def action(self, action: Any) -> Any:
        return min(int(action), 1)


def test_a_policy_in_numpy_gives_the_same_bits_whoever_runs_it() -> None:
    """I6: with other workers batches are others; an update between rounds is seen by all."""
    results = []
    for workers in ({"num_executors": 1}, {"num_executors": 5, "num_actors": 2}):
        policy = dense()
        torch.manual_seed(1)
        envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * 5
        with HTSCollector(envs, policy, frames_per_batch=20, lag=1, **workers) as collector:
            batches = []
            for batch in collector:
                batches.append(batch)
                if len(batches) == 6:
                    break
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.add_(0.1 * torch.randn_like(parameter))
                collector.update_policy_weights_()
            with inference(ExplorationType.RANDOM):
                assert inference_of(collector).policies[0].takes_arrays
        results.append(torch.cat(batches, 1))
    assert (results[0] == results[1]).all()


def test_a_policy_in_numpy_is_the_policy_with_its_noise() -> None:
    envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * 5
    with HTSCollector(envs, dense(), frames_per_batch=20, total_frames=120, seed=0) as collector:
        data = torch.cat(list(collector), 1)
    policy = CounterPolicy(dense(), ExplorationType.RANDOM)
    policy.prepare(data[:, 0].select("observation"))
    assert policy.takes_arrays
    noise = CounterNoise(0, num_envs=5, sync_interval=4, width=policy.width)
    with torch.inference_mode():
        torch.testing.assert_close(dense()(data.clone())["state_value"], data["state_value"])
        log_prob = dense()[1].get_dist(data.clone()).log_prob(data["action"])
    torch.testing.assert_close(log_prob, data["action_log_prob"])
    for step in range(data.shape[1]):
        rows, words = data[:, step].select("observation"), noise.round(step // 4)[:, step % 4]
        assert torch.equal(policy(rows, words)["action"], data["action"][:, step])


def test_before_the_calibration_padded_rows_have_proper_noise() -> None:
    """An actor that takes the place of another doesn't calibrate, and may pad its first batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), NormalParamExtractor()).double()
    policy = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=D.Normal,
        return_log_prob=True,
    )
    envs = [partial(EchoEnv, (4,), action_space=BOX)] * 3
    with HTSCollector(envs, policy, frames_per_batch=12) as collector:
        next(iter(collector))
        with inference(ExplorationType.RANDOM):
            actor = inference_of(collector)
            written: Any = actor.run(actor.policies[0], size=3)["action"]
    assert torch.as_tensor(written).isfinite().all()


class NoZeros(nn.Module):
    """Refuses rows that no environment gives, as bounds and lengths of 0 are refused."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if not observation.any(-1).all():
            raise ValueError("a row of zeros")
        return torch.ones(observation.shape[:-1], dtype=torch.int64)


def test_before_the_calibration_padded_rows_are_such_as_the_policy_takes() -> None:
    """Likewise."""
    policy = TensorDictModule(NoZeros(), ["observation"], ["action"])
    with HTSCollector([partial(EchoEnv, (4,))] * 3, policy, frames_per_batch=12) as collector:
        next(iter(collector))
        with inference(ExplorationType.RANDOM):
            actor = inference_of(collector)
            written: Any = actor.run(actor.policies[0], size=3)["action"]
    assert (torch.as_tensor(written) == 1).all()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (dense, r"NaN in 'hidden'.*module\.0\.module\.2\.bias"),
        (lambda: dense().select_out_keys("action"), r"NaN in module\.0\.module\.2\.bias, and"),
    ],
)
def test_a_policy_that_has_become_nan_is_told_of(make: Any, error: str) -> None:
    """Also where it writes nothing but actions, which are numbers in any case."""
    policy = make()
    envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * 2
    with HTSCollector(envs, policy, frames_per_batch=8) as collector:
        batches = iter(collector)
        next(batches)
        with torch.no_grad():
            policy[0].module[2].bias[1] = torch.nan
        collector.update_policy_weights_()
        with pytest.raises(WorkerError, match=error):  # noqa: PT012
            for _ in range(4):
                next(batches)


def test_buffers_that_have_become_nan_are_told_of() -> None:
    norm = RunningNorm(4)
    policy = ProbabilisticActor(
        TensorDictModule(nn.Sequential(norm, nn.Linear(4, 3)), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=D.Categorical,
        return_log_prob=True,
    )
    envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * 2
    with HTSCollector(envs, policy, frames_per_batch=8) as collector:
        batches = iter(collector)
        next(batches)
        norm.var[2] = torch.nan
        collector.update_policy_weights_()
        with pytest.raises(WorkerError, match=r"NaN is in its buffers .*\.var: check what"):  # noqa: PT012
            for _ in range(4):
                next(batches)


class Strict(nn.Linear):
    """Insists on what is inside."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.inner = nn.Linear(64, 64)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert "forward" not in vars(self.inner)
        return self.inner(super().forward(input))  # type: ignore[no-any-return]


def convolutional(last: nn.Module) -> TensorDictSequential:
    """A policy that torch runs, of which the linear layers are to be transposed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(-1, (1, 4)), nn.Conv1d(1, 8, 1), nn.Flatten())
    trunk = nn.Sequential(net, nn.Linear(32, 64), nn.ReLU(), last)
    return TensorDictSequential(TensorDictModule(trunk, ["observation"], ["hidden"]), drawing(64))


PLAIN, WHOLE = (InvariantSizes(sizes, sizes[-1], fixed_rows=False) for sizes in [(2, 3), (3, 5)])
TRANSPOSED = replace(WHOLE, transposed=True)


@pytest.mark.parametrize(
    ("last", "found", "chosen"),
    [(nn.Tanh, WHOLE, TRANSPOSED), (nn.Tanh, PLAIN, PLAIN), (Strict, WHOLE, PLAIN)],
    ids=["all rows in one batch", "no gain", "a policy that fails with it"],
)
def test_linear_layers_are_transposed_where_batches_would_be_cut_otherwise(
    last: Any, found: InvariantSizes, chosen: InvariantSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6; the sizes tell it, and whoever takes an actor's place does the same."""
    envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * 5

    def transposes(actor: BatchInference) -> bool:
        return any(is_transposed(module) for module in actor.policies[1].policy.modules())

    with (
        HTSCollector(envs, convolutional(last()), frames_per_batch=20, seed=0) as collector,
        inference(ExplorationType.RANDOM),
    ):
        next(iter(collector))
        actor, successor = inference_of(collector), inference_of(collector)
        measure = {False: PLAIN, True: replace(found, transposed=True)}
        monkeypatch.setattr(calibration, "measure", lambda actor: measure[transposes(actor)])
        assert calibration.calibrate(actor) == chosen
        assert transposes(actor) == chosen.transposed
        for each in (actor, successor):
            each.use(chosen)
            assert transposes(each) == each.policies.transposed == chosen.transposed
        first, second = (each.run(each.policies[1], 5)["hidden"] for each in (actor, successor))
        assert torch.equal(first, second)


FIXED = InvariantSizes((16,), 16, fixed_rows=True)
CUT = InvariantSizes((4, 8), 8, fixed_rows=False)
BLOCKED = InvariantSizes((4, 8, 16), 16, fixed_rows=False, blocked=True)


@pytest.mark.parametrize(
    ("found", "blocked", "chosen"),
    [
        (FIXED, BLOCKED, BLOCKED),
        (CUT, BLOCKED, BLOCKED),
        (CUT, replace(CUT, blocked=True), CUT),
        (InvariantSizes((2, 16), 16, fixed_rows=False), BLOCKED, None),
    ],
    ids=["rows of their own", "batches cut", "no gain", "all rows in one batch"],
)
def test_numpy_multiplies_in_blocks_where_that_is_cheaper(
    found: InvariantSizes,
    blocked: InvariantSizes,
    chosen: InvariantSizes | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all rows go in one batch already, blocks aren't tried."""
    envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * 16
    with (
        HTSCollector(envs, dense(), frames_per_batch=64, seed=0) as collector,
        inference(ExplorationType.RANDOM),
    ):
        next(iter(collector))
        actor = inference_of(collector)
        measure = {False: found, True: blocked}
        tried = []
        monkeypatch.setattr(
            calibration,
            "measure",
            lambda actor: tried.append(actor.policies.blocked) or measure[actor.policies.blocked],
        )
        assert calibration.calibrate(actor) == (chosen or found)
        assert actor.policies.blocked == (chosen or found).blocked
        assert tried == [False] * (chosen is None) or [False, True]


@pytest.mark.parametrize(
    ("make_policy", "sizes"),
    [
        # In blocks of 8, on whatever CPU: the batch of all, each row in a place of its own.
        (dense, InvariantSizes((16,), 16, fixed_rows=True, blocked=True)),
        (
            partial(convolutional, nn.Tanh()),
            InvariantSizes((5,), 5, fixed_rows=True, transposed=True),
        ),
    ],
    ids=["blocked", "transposed"],
)
def test_layers_run_otherwise_give_the_same_bits_whoever_runs_them(
    make_policy: Callable[[], Any], sizes: InvariantSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6, and what they compute is the policy."""
    start, rows = Workers.start_actors, sizes.full_size
    monkeypatch.setattr(
        Workers, "start_actors", lambda self, job: start(self, replace(job, sizes=sizes))
    )
    envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * rows
    batches = []
    for workers in ({"num_executors": 1}, {"num_executors": 5, "num_actors": 2}):
        policy = make_policy()
        with HTSCollector(
            envs,
            policy,
            frames_per_batch=4 * rows,
            total_frames=12 * rows,
            seed=0,
            **workers,
        ) as collector:
            batches.append(torch.cat(list(collector), 1))
            assert collector.statistics().invariant_sizes == sizes
    assert (batches[0] == batches[1]).all()
    with torch.inference_mode():
        rows = batches[0].reshape(-1)
        expected = policy[0](rows.select("observation"))["hidden"]
    torch.testing.assert_close(rows["hidden"], expected)


class Pixels(nn.Module):
    """A small observation made an image of 16 x 16."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(1, 65.0) * observation[..., None]
        return angles.sin().reshape(*observation.shape[:-1], 1, 16, 16)


class View(nn.Module):
    """Takes for granted that channels come first in memory."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return maps.view(len(maps), -1)


def large(flatten: nn.Module) -> TensorDictSequential:
    """A policy with layers that are to be packed, and others."""
    torch.manual_seed(0)
    net = nn.Sequential(Pixels(), nn.Conv2d(1, 8, 5), nn.ReLU(), flatten, nn.Linear(1152, 512))
    return TensorDictSequential(TensorDictModule(net, ["observation"], ["hidden"]), drawing(512))


def collect_and_change(policy: TensorDictSequential, **options: Any) -> list[TensorDictBase]:
    """Batches of rounds before each of which the parameters change; they are put back at last."""
    envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * 8
    first = deepcopy(policy.state_dict())
    with HTSCollector(envs, policy, frames_per_batch=32, seed=0, lag=0, **options) as collector:
        batches = []
        for batch in collector:
            rows = batch.reshape(-1)
            with torch.inference_mode():
                hidden = policy[0](rows.select("observation"))["hidden"]
            torch.testing.assert_close(rows["hidden"], hidden)
            batches.append(batch)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter *= 0.9
        assert collector.statistics().invariant_sizes.packed
    policy.load_state_dict(first)
    return batches


def test_packed_layers_follow_the_parameters_and_give_the_same_bits_whoever_runs_them() -> None:
    """I2 and I6, through several turns of each slot."""
    policy = large(nn.Flatten())
    few, many = (
        torch.cat(collect_and_change(policy, total_frames=224, **workers), 1)
        for workers in ({"num_executors": 1}, {"num_executors": 5, "num_actors": 2})
    )
    assert (few == many).all()


class Clamped(nn.Sequential):
    """Keeps the weights of a layer small, as it runs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self[1].weight.data.clamp_(-0.01, 0.01)
        return super().forward(input)


@pytest.mark.parametrize(
    "flatten",
    [View(), Clamped(nn.Flatten(), nn.Linear(1152, 1152))],
    ids=["it fails with them", "it changes weights"],
)
def test_a_policy_that_goes_wrong_with_packed_layers_runs_as_it_is(flatten: nn.Module) -> None:
    envs = [partial(Three, partial(gym.make, "CartPole-v1"))] * 8
    policy = large(flatten)
    with HTSCollector(envs, policy, frames_per_batch=32, total_frames=64) as collector:
        data = torch.cat(list(collector), 1)
        assert not collector.statistics().invariant_sizes.packed
    with torch.inference_mode():
        expected = policy[0](data.reshape(-1).select("observation"))["hidden"]
    torch.testing.assert_close(data.reshape(-1)["hidden"], expected)
