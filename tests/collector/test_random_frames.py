"""``init_random_frames``: at first actions are random, and the policy isn't asked."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from collectors import collect, one_batch, start
from environments import EchoEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from policies import categorical
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.data import Unbounded
from torchrl.envs import (
    ActionMask,
    Compose,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    TensorDictPrimer,
    TransformedEnv,
)
from torchrl.modules import LSTMModule, MaskedCategorical, OneHotCategorical, ProbabilisticActor

from torchrl_hts._planning.random_actions import reads_masks

pytestmark = [pytest.mark.usefixtures("collectors_end"), pytest.mark.timeout(120)]

ENVS = [partial(gym.make, "CartPole-v1")] * 3


def cartpole_policy() -> nn.Module:
    return categorical(4, 2)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_first_rounds_are_those_without_a_policy(lag: int) -> None:
    """And the others are the policy's, with the noise of their rounds."""
    at_random = collect(ENVS, None, rounds=2)
    batch = collect(ENVS, cartpole_policy(), rounds=4, init_random_frames=24, lag=lag)
    for key in ("observation", "action", ("next", "reward"), ("next", "observation")):
        assert (batch[key][:, :8] == at_random[key]).all(), key
    assert not batch["logits"][:, :8].any()
    assert batch["logits"][:, 8:].all()
    assert batch["policy_version"][0].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_any_number_of_workers_gives_the_same_bits() -> None:
    batches = [
        collect(ENVS, cartpole_policy(), 4, init_random_frames=24, num_executors=e, num_actors=a)
        for e, a in [(1, 1), (3, 2)]
    ]
    assert (batches[0] == batches[1]).all()


def test_frames_are_rounded_up_to_batches() -> None:
    batch = collect(ENVS, cartpole_policy(), init_random_frames=13)
    assert not batch["logits"][:, :8].any()
    assert batch["logits"][:, 8:].all()


@pytest.mark.parametrize("rounds_before", [1, 2, 3])
def test_a_run_is_resumed_among_them_and_after(rounds_before: int) -> None:
    options: dict[str, Any] = {"init_random_frames": 24, "total_frames": 48}
    whole = torch.cat(list(start(ENVS, cartpole_policy(), **options)), 1)
    with start(ENVS, cartpole_policy(), **options) as collector:
        iterator = iter(collector)
        for _ in range(rounds_before):
            next(iterator)
        state = collector.state_dict()
    with start(ENVS, cartpole_policy(), **options) as collector:
        collector.load_state_dict(state)
        rest = torch.cat(list(collector), 1)
    assert (rest == whole[:, 4 * rounds_before :]).all()


def test_a_collector_goes_back_into_them() -> None:
    """What its slots hold of later rounds, which the policy has written, doesn't stay there."""
    with start(ENVS, cartpole_policy(), init_random_frames=60) as collector:
        iterator = iter(collector)
        state = collector.state_dict()
        first = torch.cat([next(iterator) for _ in range(8)], 1)
        collector.load_state_dict(state)
        again = torch.cat([next(iterator) for _ in range(8)], 1)
    assert (again == first).all()
    assert not again["logits"][:, :20].any()


class Writes(nn.Module):
    """Writes actions of a shape and type."""

    def __init__(self, *forms: tuple[tuple[int, ...], torch.dtype]) -> None:
        super().__init__()
        self.forms = forms

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ones(len(observation), *shape, dtype=kind) for shape, kind in self.forms)


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (Discrete(3, start=5), (3,), torch.bool),
        (Discrete(3), (1,), torch.float32),
        (MultiDiscrete([2, 3]), (5,), torch.int64),
        (MultiDiscrete([[2, 3], [4, 5]]), (4,), torch.int64),
        (MultiBinary(4), (4,), torch.bool),
        (Box(-2, 3, (2, 2), np.float32), (4,), torch.float64),
        (Box(0, 9, (3,), np.int64), (3,), torch.int32),
    ],
)
def test_actions_have_the_form_of_the_policys(
    space: gym.Space[Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    policy = TensorDictModule(Writes((shape, dtype)), ["observation"], ["action"])
    envs = [partial(EchoEnv, action_space=space)] * 2
    batch = collect(envs, policy, rounds=7, init_random_frames=56)
    actions = batch["action"].reshape(56, *shape)
    assert (actions.dtype, actions.shape[1:]) == (dtype, shape)
    assert len(actions.double().unique(dim=0)) > 2, "they are drawn"
    if shape == (3,) and dtype is torch.bool:
        assert (actions.sum(1) == 1).all(), "one-hot"
    if shape == (5,):
        assert (actions[:, :2].sum(1) == 1).all()
        assert (actions[:, 2:].sum(1) == 1).all()


class Steered(EchoEnv):
    """Takes actions of two parts."""

    def step(self, action: dict[str, Any]) -> Any:
        assert self.action_space.contains(action)
        self.action_space, space = Discrete(4), self.action_space
        stepped = super().step(action["turn"])
        self.action_space = space
        return stepped


def test_actions_of_several_parts() -> None:
    space = Dict({"turn": Discrete(4), "push": Box(-1, 1, (2,))})
    policy = TensorDictModule(
        Writes(((4,), torch.int64), ((2,), torch.float32)),
        ["observation"],
        [("action", "turn"), ("action", "push")],
    )
    batch = collect([partial(Steered, action_space=space)], policy, rounds=4, init_random_frames=16)
    assert (batch["action", "turn"].sum(-1) == 1).all()
    assert len(batch["action", "push"].reshape(16, 2).unique(dim=0)) == 16


def test_torchrl_environments() -> None:
    """A lone one, whose spec is one-hot, and a batch that is taken apart."""
    net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    policy = ProbabilisticActor(net, ["logits"], distribution_class=OneHotCategorical)
    make = partial(GymEnv, "CartPole-v1")
    for env in (make, ParallelEnv(2, make)):
        batch = one_batch(env, policy, init_random_frames=12)
        assert (batch["action"].sum(-1) == 1).all()
        assert not batch["logits"].any()


def test_a_recurrent_policy_begins_from_zeros_after_them() -> None:
    lstm = LSTMModule(input_size=4, hidden_size=8, in_key="observation", out_key="features")
    head = TensorDictModule(partial(torch.argmax, dim=-1), ["features"], ["large"])
    action = TensorDictModule(partial(torch.clamp, max=1), ["large"], ["action"])
    policy = TensorDictSequential(lstm, head, action)
    batch = collect(ENVS, policy, rounds=3, init_random_frames=24)
    state = batch["recurrent_state_h"]
    assert not state[:, :9].any()
    assert state[:, 9].any()


def masked() -> Any:
    """A TorchRL environment whose mask comes into the spec with the first reset."""
    env = GymWrapper(MaskedEnv(), categorical_action_encoding=True)
    return TransformedEnv(env, ActionMask(mask_key="mask"))


class MaskedEnv(EchoEnv):
    """Tells which actions it takes."""

    def __init__(self) -> None:
        super().__init__()
        space = self.observation_space
        self.observation_space = Dict({"observation": space, "mask": Box(0, 1, (3,), bool)})

    def _observe(self, action: float) -> Any:
        return {"observation": super()._observe(action), "mask": np.array([1, 0, 1], bool)}


def test_masked_actions_are_refused() -> None:
    """Be it the environment's spec that has the mask, or the policy that reads one."""
    said = "^random actions would ignore the mask of .*: leave init_random_frames=8 out$"
    with pytest.raises(TypeError, match=said):
        start([masked], init_random_frames=8)
    with start([masked]) as collector:
        next(iter(collector))
    policy = ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 3).double(), ["observation"], ["logits"]),
        in_keys={"logits": "logits", "mask": "mask"},
        distribution_class=MaskedCategorical,
    )
    said = "^random actions would ignore the mask that the policy reads: leave init_random_frames="
    with pytest.raises(TypeError, match=said):
        start([MaskedEnv], policy, init_random_frames=8)
    with start([MaskedEnv], policy) as collector:
        assert (next(iter(collector))["action"] != 1).all()


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (MaskedCategorical, {}),
        (partial(MaskedCategorical), {}),
        (CompositeDistribution, {"distribution_map": {"action": MaskedCategorical}}),
    ],
)
def test_a_policy_that_reads_masks_is_known(kind: Any, kwargs: Any) -> None:
    draws = ProbabilisticTensorDictModule(
        ["params"], ["action"], distribution_class=kind, distribution_kwargs=kwargs
    )
    assert reads_masks(nn.ModuleList([draws]))
    plain = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    assert not reads_masks(nn.ModuleList([plain]))


@pytest.mark.parametrize("writes", ["s", ("next", "s")])
def test_what_the_policy_carries_stays_what_it_is(writes: Any) -> None:
    """A state that a primer begins with 5, as in TorchRL's collectors."""

    def make() -> Any:
        primer = TensorDictPrimer(s=Unbounded((1,)), default_value=5.0)
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        return TransformedEnv(env, Compose(InitTracker(), primer))

    policy = TensorDictModule(Counts(), ["observation", "s"], ["action", writes])
    batch = collect([make], policy, rounds=2, init_random_frames=4)
    assert batch["s"][0, :4].eq(5).all()
    assert batch["s"][0, 4:].flatten().tolist() == [5 + step + (writes == "s") for step in range(4)]


class Counts(nn.Module):
    """Counts on from what it is given."""

    def forward(self, observation: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(observation.shape[:-1], dtype=torch.int64), s + 1


def test_actions_without_elements() -> None:
    space = Box(0, 1, (0,))
    policy = TensorDictModule(Writes(((0,), torch.float32)), ["observation"], ["action"])
    batch = collect([partial(EchoEnv, action_space=space)], policy, init_random_frames=4)
    assert batch["action"].shape == (1, 12, 0)


def test_a_state_of_other_random_frames_is_told() -> None:
    """While it makes a difference."""
    with start(ENVS, cartpole_policy(), init_random_frames=24) as collector:
        states = [collector.state_dict()]
        for _ in zip(range(3), collector, strict=False):
            states.append(collector.state_dict())
    for state, differs in zip(states, [True, True, False, False], strict=True):
        with start(ENVS, cartpole_policy(), lag=1) as collector, warnings.catch_warnings():
            warnings.simplefilter("error")
            if differs:
                with pytest.raises(
                    UserWarning, match=r"init_random_frames=24 where the state.*, 0"
                ):
                    collector.load_state_dict(state)
            else:
                collector.load_state_dict(state)


@pytest.mark.parametrize("value", [-2, "many", 1.5, True])
def test_what_is_no_number_of_frames(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^init_random_frames must be .*, got "):
        start([EchoEnv], init_random_frames=value)


@pytest.mark.parametrize("nothing", [0, -1, None])
def test_none_at_all(nothing: int | None) -> None:
    batch = collect(ENVS, cartpole_policy(), rounds=1, init_random_frames=nothing)
    assert batch["logits"].all()
