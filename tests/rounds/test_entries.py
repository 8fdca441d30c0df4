"""What isn't a plain tensor, or has no spec, is named in an error and never left out in silence."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from collectors import start
from environments import EchoEnv
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    tensorclass,
)
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import GymWrapper, RewardScaling, TransformedEnv
from torchrl_environments import Spoken

from torchrl_hts._executor.torchrl_values import guard_conversions
from torchrl_hts._rounds.entries import check_fixed_shapes, check_specified, leaves
from torchrl_hts.errors import InvalidValueError


@tensorclass
class Pair:
    one: Tensor
    two: Any


def lazy(*shapes: int, more: bool = False) -> LazyStackedTensorDict:
    parts = [TensorDict(a=torch.zeros(n)) for n in shapes]
    if more:
        parts[0]["b"] = torch.zeros(1)
    return LazyStackedTensorDict(*parts)


def test_tensors_at_any_depth() -> None:
    pair = Pair(one=torch.zeros(3), two=torch.zeros(4), batch_size=[])
    td = TensorDict(
        a=torch.zeros(2), pair=pair, deep=TensorDict(b=torch.ones(1)), agents=lazy(2, 2)
    )
    assert {key: tuple(value.shape) for key, value in leaves(td)} == {
        ("a",): (2,),
        ("pair", "one"): (3,),
        ("pair", "two"): (4,),
        ("deep", "b"): (1,),
        ("agents", "a"): (2, 2),
    }


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (NonTensorData("x"), "'it' is a NonTensorData"),
        ("x", "'it' is a NonTensorData"),
        (NonTensorStack("x", "y"), "'it' is a NonTensor"),
        (torch.distributions.Normal(0, 1), "'it' is a NonTensorData"),
        (TensorDict(deep="x"), r"\('it', 'deep'\) is a NonTensorData"),
        (Pair(one=torch.zeros(3), two="x", batch_size=[]), r"\('it', 'two'\) is a NonTensorData"),
        (lazy(2, 3), "'it' is a LazyStackedTensorDict"),
        (lazy(2, 2, more=True), "'it' is a LazyStackedTensorDict"),
        (torch.eye(2).to_sparse(), "'it' is a tensor of layout torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("prefix", [(), ("next",)])
def test_what_is_no_plain_tensor(entry: Any, said: str, prefix: tuple[str, ...]) -> None:
    td = TensorDict({})
    td.set((*prefix, "it"), entry)
    with pytest.raises(TypeError, match=f"the environment's entry {said}"):
        list(leaves(td))
    with pytest.raises(TypeError, match=f"the policy's entry {said}"):
        list(leaves(td, "policy"))


def test_what_an_environment_keeps_for_itself() -> None:
    td = TensorDict(_own="x", a=torch.zeros(1))
    assert [key for key, _ in leaves(td)] == [("a",)]
    with pytest.raises(TypeError, match="the policy's entry '_own'"):
        list(leaves(td, "policy"))


def test_shapes_that_change() -> None:
    specs = Composite(output_spec=Composite(deep=Composite(a=Unbounded((-1, 2)))))
    with pytest.raises(TypeError, match=r"the spec of \('deep', 'a'\) has the shape \(-1, 2\)"):
        check_fixed_shapes(specs)
    check_fixed_shapes(Composite(a=Unbounded((1, 2))))


def test_what_has_no_spec() -> None:
    td = TensorDict(a=torch.zeros(1), deep=TensorDict(b="x", _own=1), _own=torch.zeros(1))
    check_specified(td, {("a",), ("deep", "b")})
    check_specified(td, {("next", "a"), ("next", "deep", "b")}, ("next",))
    with pytest.raises(InvalidValueError, match=r"returned \('deep', 'b'\), for which it has no"):
        check_specified(td, {("a",)})


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_that_returns_more_than_its_specs_say(where: str) -> None:
    collector = start([partial(Spoken, where, "tensor")])
    with pytest.raises(Exception, match="returned 'said', for which it has no spec") as caught:
        next(iter(collector))
    collector.shutdown()
    assert caught.value.failure.name == "INVALID"  # type: ignore[attr-defined]


class Returns(gym.Env[Any, Any]):
    """Returns what it is given, in a space of uint8 and one of float32."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, floats: Any, reward: Any, codes: Any = (0, 0)) -> None:
        self.observation_space = gym.spaces.Dict(
            f=gym.spaces.Box(-1, 1, (2,), np.float32), c=gym.spaces.Box(0, 255, (2,), np.uint8)
        )
        self.seen, self.reward = {"f": np.asarray(floats), "c": np.asarray(codes)}, reward

    def reset(self, **_: Any) -> Any:
        return dict(self.seen), {}

    def step(self, action: Any) -> Any:
        return dict(self.seen), self.reward, False, False, {}


def wrapped(*returned: Any) -> Any:
    env = TransformedEnv(GymWrapper(Returns(*returned)), RewardScaling(0.0, 1.0))
    guard_conversions(env)
    return env


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (([0.0, 1e39], 1.0), r"'f' with the value 1e\+39; .* float32"),
        (([0.0, 1.0], 1e39), r"the reward 1e\+39; expected one number that float32 holds"),
        (([0.0, 1.0], np.float64(-1e39)), "the reward -1e"),
        (([0.0, 1.0], np.array([1.0, 1e39])), "the reward 1e"),
        (([0.0, 1.0], 1.0, [0, 256]), "'c' of data type int64 with values from 0 to 256"),
        (([0.0, 1.0], 1.0, [0.0, 0.5]), "'c' of data type float64; .* says uint8"),
    ],
)
def test_what_a_gym_wrapper_would_convert_away(returned: Any, said: str) -> None:
    env = wrapped(*returned)
    with pytest.raises(InvalidValueError, match=f"the environment returned {said}"):
        env.rollout(1)


@pytest.mark.parametrize(
    "returned",
    [
        ([0.1, 0.5], 1.0),
        ([np.inf, 0], float("inf")),
        (np.ones(2, np.float32), np.float32(2)),
        ([0, 1], 0, [0.0, 255.0]),
        ([0, 1], torch.tensor(1.0), np.array([1, 2], np.int32)),
    ],
)
def test_what_a_gym_wrapper_may_convert(returned: Any) -> None:
    td = wrapped(*returned).rollout(1)
    assert td["f"][0].tolist() == np.asarray(returned[0], np.float32).tolist()
    assert td["next", "reward"].item() == float(returned[1])


def test_a_space_that_is_no_dict() -> None:
    class Plain(Returns):
        def __init__(self) -> None:
            super().__init__([0, 0], 1.0)
            self.observation_space = self.observation_space["f"]  # type: ignore[index]
            self.seen = [0.0, 1e39]  # type: ignore[assignment]

        def reset(self, **_: Any) -> Any:
            return np.array(self.seen), {}

    env = GymWrapper(Plain())
    guard_conversions(env)
    with pytest.raises(InvalidValueError, match=r"'observation' with the value 1e\+39"):
        env.reset()


class Undeclared(TensorDictModuleBase):
    """Writes more than it says."""

    in_keys, out_keys = ["observation"], ["action"]

    def __init__(self, more: Any) -> None:
        super().__init__()
        self.more = more

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"] = torch.ones(tensordict.shape, dtype=torch.int64)
        tensordict["more"] = self.more or tensordict["observation"].sum(-1)
        return tensordict


def test_what_a_policy_writes_without_declaring_it() -> None:
    """TorchRL's collectors keep it."""
    with start([EchoEnv], Undeclared(None), num_executors=1, num_actors=1) as collector:
        batch = next(iter(collector))
        assert (batch["more"] == batch["observation"].sum(-1)).all()
    with pytest.raises(TypeError, match="the policy's entry 'more' is a NonTensorData"):
        start([EchoEnv], Undeclared("text"), num_executors=1, num_actors=1)


def test_specs_of_a_spoken_environment() -> None:
    """The environment of these tests is one that TorchRL takes."""
    env = Spoken("spec", "text")
    assert isinstance(env.observation_spec["said"], NonTensor)
    assert isinstance(env.action_spec, Categorical)
    assert not isinstance(env.action_spec, Bounded)
    assert env.rollout(2)["said"] == ["hello", "hello"]
