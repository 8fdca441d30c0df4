"""RunningNorm: its numbers, that forward passes leave it alone, and where it stands in a block."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss

from torchrl_hts import DelayedGradient, RunningNorm, World

pytestmark = pytest.mark.usefixtures("seeded_thread")


def batch_of(observations: Tensor, **more: Tensor) -> TensorDict:
    return TensorDict({"observation": observations, **more}, observations.shape[:2])


def assert_statistics_of(norm: RunningNorm, seen: list[Tensor]) -> None:
    """As in the book: of all values at once."""
    values = torch.cat([each.flatten(0, 1) for each in seen]).double().numpy()
    assert norm.count == len(values)
    np.testing.assert_allclose(norm.mean.numpy(), values.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(norm.var.numpy(), values.var(0), rtol=1e-9)


@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_the_statistics_are_those_of_all_that_was_seen(
    shape: tuple[int, ...], offset: float
) -> None:
    norm = RunningNorm(shape)
    seen: list[Tensor] = []
    for rows, steps, scale in ((4, 5, 1.0), (2, 8, 0.1), (1, 1, 3.0)):
        seen.append(offset + scale * torch.randn(rows, steps, *shape, dtype=torch.float64))
        norm.update(batch_of(seen[-1]))
        assert_statistics_of(norm, seen)
    x = seen[0]
    values = torch.cat([each.flatten(0, 1) for each in seen])
    expected = ((x - values.mean(0)) / (values.var(0, correction=0) + 1e-8).sqrt()).clamp(-10, 10)
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(norm(x), expected.float(), rtol=1e-5, atol=1e-6)


def test_what_is_normalised_is_clipped_and_of_the_networks_data_type() -> None:
    norm = RunningNorm(1, clip=2.0, dtype=torch.float64)
    norm.update(batch_of(torch.tensor([[[0], [255]]], dtype=torch.uint8)))
    out = norm(torch.tensor([[0], [255], [10_000]]))
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.flatten(), torch.tensor([-1.0, 1.0, 2.0], dtype=torch.float64))


def test_before_the_first_batch_and_in_forward_passes_nothing_changes() -> None:
    norm = RunningNorm(2).train()
    x = torch.randn(5, 2)
    assert torch.equal(norm(x), x)
    norm.update(batch_of(torch.randn(2, 3, 2)))
    before = copy.deepcopy(norm.state_dict())
    first = norm(x)
    assert torch.equal(norm(x[2:3]), first[2:3])
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    other = RunningNorm(2)
    other.load_state_dict(before)
    assert torch.equal(other(x), first)


def test_padding_is_not_counted() -> None:
    norm = RunningNorm(1)
    mask = torch.tensor([[True, False], [True, True]])
    batch = batch_of(torch.tensor([[[1.0], [99.0]], [[2.0], [3.0]]]))
    batch["collector"] = TensorDict({"mask": mask}, [2, 2])
    norm.update(batch)
    assert (norm.count, norm.mean) == (3, 2)


def test_how_a_batch_lies_in_memory_makes_no_difference() -> None:
    x = torch.randn(8, 50, 7)
    lying, standing = RunningNorm(7), RunningNorm(7)
    lying.update(batch_of(x))
    standing.update(batch_of(x.transpose(0, 1).contiguous().transpose(0, 1)))
    assert torch.equal(lying.var, standing.var)


def test_shards_are_added_in_the_order_of_the_tree() -> None:
    x = torch.randn(8, 5, 3)
    whole, cut, given = (RunningNorm(3) for _ in range(3))
    threads = torch.get_num_threads()
    with World(shards=4) as world:
        whole.update(batch_of(x), world)
        given.update(world.parts(batch_of(x)), world)
    torch.set_num_threads(threads)
    assert_statistics_of(whole, [x])
    rows = [part.flatten(0, 1).double() for part in x.split(2)]
    sums = [each.sum(0) for each in rows]
    assert torch.equal(whole.mean, ((sums[0] + sums[1]) + (sums[2] + sums[3])) / 40)
    assert torch.equal(whole.var, given.var)
    cut.update(batch_of(x))
    torch.testing.assert_close(cut.var, whole.var, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RunningNorm(3, eps=0), "eps must be positive, got 0"),
        (lambda: RunningNorm(3, clip=-1), "clip must be positive, got -1"),
        (lambda: RunningNorm(4).update(batch_of(torch.ones(2, 2, 3))), r"shape \(4,\), got \(3,\)"),
        (
            lambda: RunningNorm(1).update(batch_of(torch.full((2, 2, 1), torch.inf))),
            "observations 'observation' can't be counted: some are infinite or NaN",
        ),
        (
            lambda: RunningNorm(1).update([batch_of(torch.ones(1, 2, 1))] * 2),
            "expected 1 parts, got 2: give the world that has cut them",
        ),
        (lambda: RunningNorm(-1), "shape must be at least 1, got -1"),
        (lambda: RunningNorm((3, 0)), "shape must be at least 1, got 0"),
        (lambda: RunningNorm("4"), "shape must be an int, got '4'"),
        (lambda: RunningNorm(None), "shape must be an int, got None"),
        (lambda: RunningNorm(4, eps=None), "eps must be a number, got None"),
        (lambda: RunningNorm(4, clip="x"), "clip must be a number, got 'x'"),
        (lambda: RunningNorm(4).update(None), "expected a batch, .* got NoneType: next"),
        (lambda: RunningNorm(4).update({"a": 1}), "expected a batch, .* got str"),
    ],
)
def test_bad_input_is_one_sentence(make, said) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()


@pytest.mark.parametrize("shape", [np.int64(3), [3], torch.Size([3])])
def test_the_shape_may_come_as_any_integers(shape) -> None:
    assert RunningNorm(shape).mean.shape == (3,)


def test_a_key_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match=r"no 'pixels'; give update the key of one of .*observatio"):
        RunningNorm(1).update(batch_of(torch.ones(2, 2, 1)), key="pixels")


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
def test_statistics_stay_float64_in_networks_of_other_types(cast: str) -> None:
    norm, alone = RunningNorm(1), RunningNorm(1)
    net = getattr(nn.Sequential(norm, nn.Linear(1, 1)), cast)()
    for start in range(3):
        batch = batch_of(torch.arange(100.0).reshape(2, 50, 1) + 1e6 * start)
        norm.update(batch)
        alone.update(batch)
    assert net[1].weight.dtype != torch.float64
    assert all(map(torch.equal, norm.buffers(), alone.buffers()))


def test_target_networks_with_statistics_are_refused() -> None:
    """They would stay at mean 0 and variance 1 for ever."""
    agent = Agent()
    loss_module = ClipPPOLoss(agent.actor, agent.critic, delay_actor=True)
    with (
        pytest.raises(ValueError, match="has a target network with a RunningNorm of its own"),
        DelayedGradient(loss_module),
    ):
        pass


def test_a_network_that_is_only_called_a_target_is_none() -> None:
    module = nn.ModuleDict({"target_net": nn.Sequential(RunningNorm(3), nn.Linear(3, 1))})
    with DelayedGradient(module):
        pass


# In the block of a DelayedGradient.


class Agent:
    """Actor and critic that share a RunningNorm, and TorchRL's loss of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.norm = RunningNorm(3)
        self.actor = ProbabilisticActor(
            TensorDictModule(
                nn.Sequential(self.norm, nn.Linear(3, 2)), ["observation"], ["logits"]
            ),
            ["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        self.critic = ValueOperator(nn.Sequential(self.norm, nn.Linear(3, 1)), ["observation"])
        self.loss_module = A2CLoss(self.actor, self.critic)
        self.optimizer = torch.optim.Adam(self.loss_module.parameters(), lr=0.1)

    def batch(self, j: int) -> TensorDict:
        """Of a round, as the present parameters gather it, with the statistics of that moment."""
        generator = torch.Generator().manual_seed(j)
        observations = torch.randn(2, 4, 3, generator=generator) * (j + 1) + j
        version = torch.full((2, 4), j)
        return batch_of(observations, policy_version=version)

    def learn(self, batch: TensorDict) -> None:
        """A step of the optimizer that moves all parameters."""
        logits = self.actor.get_dist(batch).logits
        values = self.critic(batch.clone())["state_value"]
        (logits.square().sum() + values.square().sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("of", ["actor", "loss_module"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_i3_in_the_block_the_statistics_are_those_of_theta_j(lag: int, of: str) -> None:
    agent = Agent()
    delayed = DelayedGradient(getattr(agent, of), lag=lag)
    seen: list[Tensor] = []
    for j in range(6):
        batch = agent.batch(j)
        with delayed(batch):
            past = seen[: max(0, j - lag)]  # what was counted when round j opened
            if past:
                assert_statistics_of(agent.norm, past)
            else:
                assert torch.equal(agent.norm.var, torch.ones(3).double())
            for name, value in agent.loss_module.named_buffers():
                if name.endswith(".mean"):  # of the actor and of the critic
                    assert torch.equal(value, agent.norm.mean)
            agent.learn(batch)
        if seen:
            assert_statistics_of(agent.norm, seen)
        agent.norm.update(batch)
        seen.append(batch["observation"])
        assert_statistics_of(agent.norm, seen)


def test_a_block_that_raises_puts_the_newest_statistics_back() -> None:
    agent = Agent()
    delayed = DelayedGradient(agent.loss_module, lag=1)
    for j in range(3):
        with delayed:
            pass
        agent.norm.update(agent.batch(j))
    newest = agent.norm.mean.clone()
    with contextlib.suppress(KeyError), delayed:
        assert not torch.equal(agent.norm.mean, newest)
        raise KeyError
    assert torch.equal(agent.norm.mean, newest)
    agent.norm.update(agent.batch(3))  # and they may be counted again


@pytest.mark.parametrize("lag", [0, 1])
def test_in_the_block_they_are_not_counted(lag: int) -> None:
    agent = Agent()
    with (
        DelayedGradient(agent.actor, lag=lag),
        pytest.raises(RuntimeError, match="call update after it, before update_policy_weights_"),
    ):
        agent.norm.update(agent.batch(0))


def test_two_blocks_with_the_same_statistics_are_refused() -> None:
    agent = Agent()
    with DelayedGradient(agent.actor):
        nested = DelayedGradient(agent.critic)
        with pytest.raises(RuntimeError, match="delay policy and critic with one of"), nested:
            pass
        with DelayedGradient(agent.critic.module[1]):
            pass
    both = DelayedGradient(nn.ModuleList([agent.actor, agent.critic]))
    for _ in range(2):
        with both:
            pass


def test_a_loss_that_was_moved_away_from_the_layer_is_refused() -> None:
    agent = Agent()
    agent.loss_module.to(torch.float16)
    delayed = DelayedGradient(agent.loss_module)
    with pytest.raises(ValueError, match="move networks to their device before the loss"), delayed:
        pass


def test_the_state_holds_the_statistics_of_the_rounds_under_way() -> None:
    def run(agent: Agent, delayed: DelayedGradient, start: int, stop: int) -> list[Tensor]:
        found = []
        for j in range(start, stop):
            batch = agent.batch(j)
            with delayed(batch):
                found.append(agent.norm.mean.clone())
            agent.norm.update(batch)
        return found

    whole = Agent()
    expected = run(whole, DelayedGradient(whole.loss_module, lag=2), 0, 8)
    first, second = Agent(), Agent()
    delayed = DelayedGradient(first.loss_module, lag=2)
    run(first, delayed, 0, 5)
    resumed = DelayedGradient(second.loss_module, lag=2)
    resumed.load_state_dict(delayed.state_dict())
    second.loss_module.load_state_dict(first.loss_module.state_dict())
    found = run(second, resumed, 5, 8)
    assert all(map(torch.equal, found, expected[5:]))
    state = delayed.state_dict()
    del state["ring.1.running_norm.0.var"]
    with pytest.raises(ValueError, match=r"ring\.1\.running_norm\.0\.var"):
        resumed.load_state_dict(state)
