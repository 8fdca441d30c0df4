"""Advice on a policy and an environment that don't fit each other, followed."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from advised import BOX, ZEROS, Odd, gather, pasted, refusal, shown
from environments import EchoEnv
from gymnasium import wrappers
from policies import categorical
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    GymWrapper,
    InitTracker,
    TensorDictPrimer,
    Transform,
    TransformedEnv,
)
from torchrl.modules import LSTMModule, MaskedCategorical, OneHotCategorical, ProbabilisticActor

S = gym.spaces
pytestmark = pytest.mark.usefixtures("warm_servers")


def actor(*, distribution: Any = Categorical, key: str = "observation") -> Any:
    net = TensorDictModule(nn.Linear(4, 3), [key], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=distribution)


def floats() -> Any:
    return wrappers.DtypeObservation(EchoEnv(), np.float32)


class TestPolicies:
    """A policy and an environment that don't fit each other."""

    def test_doubles(self) -> None:
        message = refusal(EchoEnv, actor())
        line = shown(message, "'observation' is float64: make the environment")
        assert gather(lambda: pasted(line, EchoEnv()), actor())["observation"].dtype == torch.float

    def test_halves(self) -> None:
        def make() -> Any:
            return wrappers.DtypeObservation(EchoEnv(), np.float16)

        line = shown(refusal(make, actor()), "'observation' is float16: make the environment")
        assert gather(lambda: pasted(line, make()), actor())["observation"].dtype == torch.float

    @pytest.mark.parametrize("kind", [torch.float16, torch.float64])
    def test_parameters_of_another_data_type(self, kind: torch.dtype) -> None:
        name = str(kind).removeprefix("torch.")
        message = refusal(floats, actor().to(kind))
        assert f"Parameters of the policy are {name}: make them float32 with policy.float()" in (
            message
        )
        gather(floats, actor().to(kind).float())

    def test_doubles_in_a_dict(self) -> None:
        space = S.Dict(a=S.Box(-1, 1, (4,), np.float64), b=BOX, c=S.Box(-1, 1, (1, 2), np.float64))
        make = partial(Odd, space, {"a": np.ones(4), "b": ZEROS, "c": np.full((1, 2), 0.5)})
        policy = TensorDictSequential(
            TensorDictModule(nn.Linear(2, 1), ["c"], ["features"]), actor(key="a")
        )
        line = shown(refusal(make, policy), "make the environment")
        batch = gather(lambda: pasted(line, make()), policy)
        assert (batch["c"] == 0.5).all()
        assert {batch[key].dtype for key in "abc"} == {torch.float}

    def test_doubles_deep_down(self) -> None:
        space = S.Dict(a=S.Dict(b=S.Box(-1, 1, (4,), np.float64)))
        make = partial(Odd, space, {"a": {"b": np.zeros(4)}})
        message = refusal(make, actor(key=("a", "b")))
        assert "in a gymnasium.ObservationWrapper, and in its observation_space" in message

        class Lower(gym.ObservationWrapper[Any, Any, Any]):
            observation_space = S.Dict(a=S.Dict(b=S.Box(-1, 1, (4,), np.float32)))

            def observation(self, observation: Any) -> Any:
                return {"a": {"b": observation["a"]["b"].astype(np.float32)}}

        gather(lambda: Lower(make()), actor(key=("a", "b")))

    def test_doubles_of_a_torchrl_environment(self) -> None:
        def make(*transforms: Transform) -> Any:
            env = GymWrapper(EchoEnv(), categorical_action_encoding=True)
            return TransformedEnv(env, Compose(*transforms))

        assert "torchrl.envs.DoubleToFloat() to the environment's transforms" in refusal(
            make, actor()
        )
        gather(lambda: make(DoubleToFloat()), actor())

    def test_whole_numbers(self) -> None:
        make = partial(Odd, S.Box(0, 255, (4,), np.uint8), np.zeros(4, np.uint8))
        message = refusal(make, actor())
        assert "'observation' is of integers: let the policy convert them first" in message
        gather(make, categorical())

    def test_an_action_that_is_read_back(self) -> None:
        class Last(nn.Module):
            def forward(self, observation: Tensor, action: Tensor) -> Tensor:
                return (action + 1) % 3

        class Twice(Last):
            def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
                found = super().forward(observation, action)
                return found, found

        def make(*transforms: Transform) -> Any:
            env = GymWrapper(floats(), categorical_action_encoding=True)
            return TransformedEnv(env, Compose(*transforms))

        policy = TensorDictModule(Last(), ["observation", "action"], ["action"])
        for refused in (make, floats):
            message = refusal(refused, policy)
            assert "Write it twice, also as last_action" in message
        advised = TensorDictModule(
            Twice(), ["observation", "last_action"], ["action", "last_action"]
        )
        primer = TensorDictPrimer(last_action=Unbounded((), dtype=torch.int64))
        actions = gather(lambda: make(primer), advised)["action"][0]
        assert (actions == torch.arange(1, len(actions) + 1) % 3).all()

    def test_a_mask_of_integers(self) -> None:
        class Allowing(nn.Module):
            def __init__(self, *, advised: bool) -> None:
                super().__init__()
                self.advised = advised

            def forward(self, mask: Tensor) -> tuple[Tensor, Tensor]:
                logits = torch.zeros(mask.shape)
                return logits, mask.bool() if self.advised else mask

        def masked(*, advised: bool) -> Any:
            net = TensorDictModule(
                Allowing(advised=advised), ["observation"], ["logits", "allowed"]
            )
            return ProbabilisticActor(
                net,
                in_keys={"logits": "logits", "mask": "allowed"},
                distribution_class=MaskedCategorical,
            )

        make = partial(Odd, S.MultiBinary(3), np.array([0, 1, 1], np.int8))
        message = refusal(make, masked(advised=False))
        assert "'observation' is of integers: let the policy make masks bool" in message
        assert (gather(make, masked(advised=True))["action"] > 0).all()

    def test_a_failure_that_has_nothing_to_do_with_data_types(self) -> None:
        assert "float" not in refusal(partial(Odd, S.Box(-1, 1, (5,)), ZEROS), actor()).replace(
            "torch.float32", ""
        )

    def test_a_one_hot_action_spec(self) -> None:
        make = partial(GymWrapper, categorical_action_encoding=True)
        message = refusal(lambda: GymWrapper(floats()), actor())
        assert "categorical_action_encoding=True" in message
        assert "torchrl.modules.OneHotCategorical" in message
        gather(lambda: make(floats()), actor())
        gather(lambda: GymWrapper(floats()), actor(distribution=OneHotCategorical))

    def test_an_index_action_spec(self) -> None:
        def make(encoding: bool) -> Any:
            return lambda: GymWrapper(floats(), categorical_action_encoding=encoding)

        message = refusal(make(True), actor(distribution=OneHotCategorical))
        assert "categorical_action_encoding=False" in message
        assert "torch.distributions.Categorical" in message
        gather(make(False), actor(distribution=OneHotCategorical))

    def test_several_one_hot_actions(self) -> None:
        class Indices(nn.Module):
            def forward(self, observation: Tensor) -> Tensor:
                return torch.ones(*observation.shape[:-1], 2, dtype=torch.int64)

        policy = TensorDictModule(Indices(), ["observation"], ["action"])

        def make(**kwargs: Any) -> Any:
            return GymWrapper(EchoEnv(action_space=S.MultiDiscrete([2, 3])), **kwargs)

        assert "categorical_action_encoding=True (GymEnv, GymWrapper)" in refusal(make, policy)
        gather(partial(make, categorical_action_encoding=True), policy)

    def test_a_policy_that_reads_info(self) -> None:
        """The guide that is named has a test that follows it (test_readme.py)."""
        policy = TensorDictModule(nn.Identity(), ["action_mask"], ["action"])
        said = refusal(EchoEnv, policy, info_keys=["action_mask"])
        assert "move it there with a gymnasium.Wrapper, as docs/how_to/carry_info.md shows" in said
        assert "(info_keys are for the learner)" in said

    def test_a_recurrent_policy_without_a_primer(self) -> None:
        lstm = LSTMModule(
            4, 5, in_keys=["observation", "h", "c"], out_keys=["x", ("next", "h"), ("next", "c")]
        )
        head = TensorDictModule(nn.Linear(5, 3), ["x"], ["logits"])
        policy = TensorDictSequential(
            lstm, ProbabilisticActor(head, in_keys=["logits"], distribution_class=Categorical)
        )

        def make(*transforms: Transform) -> Any:
            env = GymWrapper(floats(), categorical_action_encoding=True)
            return TransformedEnv(env, Compose(*transforms))

        message = refusal(make, policy)
        assert "the policy reads 'h', which the environment does not give" in message
        assert "torchrl.envs.InitTracker()" in message
        assert "make_tensordict_primer()" in message
        primer = lstm.make_tensordict_primer()
        assert "InitTracker() to the environment's transforms" in refusal(
            lambda: make(lstm.make_tensordict_primer()), policy
        )
        assert primer.primers["h"].shape == (1, 5)
        gather(lambda: make(InitTracker(), lstm.make_tensordict_primer()), policy)

    def test_bfloat16_actions(self) -> None:
        class Half(nn.Module):
            def forward(self, observation: Tensor) -> Tensor:
                return torch.zeros(*observation.shape[:-1], 2, dtype=torch.bfloat16)

        policy = TensorDictModule(Half(), ["observation"], ["action"])
        make = partial(EchoEnv, action_space=BOX)
        assert "let its distribution work in float32" in refusal(make, policy)

        class Full(Half):
            def forward(self, observation: Tensor) -> Tensor:
                return super().forward(observation).float()

        gather(make, TensorDictModule(Full(), ["observation"], ["action"]))

    def test_lazy_parameters(self) -> None:
        net = nn.Sequential(nn.LazyLinear(3))
        policy = ProbabilisticActor(
            TensorDictModule(net, ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=Categorical,
        )
        main = os.getpid()

        def elsewhere() -> Any:
            if os.getpid() == main:
                raise RuntimeError("no engine here")
            return floats()

        message = refusal(elsewhere, policy)
        assert "can't be initialised here (RuntimeError: no engine here)" in message
        assert "run it once before, on a batch like env.fake_tensordict()" in message
        env = GymWrapper(floats(), categorical_action_encoding=True)
        policy(env.fake_tensordict())
        gather(elsewhere, policy)
