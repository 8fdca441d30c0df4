"""Advice in error messages, followed: what the message says has to be in it, and has to work."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from advised import BOX, ZEROS, Odd, Says, gather, refusal, shown
from environments import EchoEnv
from gymnasium import wrappers
from policies import categorical, marked
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Composite, NonTensor, TensorSpec, Unbounded
from torchrl.envs import Compose, ExcludeTransform, GymWrapper, TransformedEnv
from torchrl_environments import Spoken

S = gym.spaces
pytestmark = pytest.mark.usefixtures("warm_servers")


class TestKeys:
    """Keys that are no strings."""

    @pytest.mark.parametrize(
        ("space", "seen", "said"),
        [
            ({"observation": BOX, 7: BOX}, {"observation": ZEROS, 7: ZEROS}, "the key 7, which"),
            ({"observation": S.Dict({(1, 2): BOX})}, {}, r"the key (1, 2) below 'observation'"),
        ],
    )
    def test_of_an_observation_space(self, space: Any, seen: Any, said: str) -> None:
        message = refusal(partial(Odd, S.Dict(space), seen))
        assert said in message
        assert "not a string" in message
        assert "rename it with gymnasium.wrappers.TransformObservation" in message

    def test_of_an_observation_space_renamed(self) -> None:
        def make() -> Any:
            env = Odd(S.Dict({"observation": BOX, 7: BOX}), {"observation": ZEROS, 7: ZEROS + 1})
            space = S.Dict({"observation": BOX, "seven": BOX})
            return wrappers.TransformObservation(
                env, lambda seen: {"observation": seen["observation"], "seven": seen[7]}, space
            )

        assert (gather(make)["seven"] == 1).all()

    def test_of_an_action_space(self) -> None:
        space = S.Dict({7: S.Discrete(3)})
        assert "the action space has the key 7, which is not a string" in (
            message := refusal(partial(EchoEnv, action_space=space))
        )
        assert "rename it with gymnasium.wrappers.TransformAction" in message

        def make() -> Any:
            env = Taking(space)
            return wrappers.TransformAction(
                env, lambda taken: {7: taken["seven"]}, S.Dict({"seven": S.Discrete(3)})
            )

        policy = marked()
        policy.out_keys[0] = policy.out_keys_source[0] = ("action", "seven")
        gather(make, policy)


class Taking(EchoEnv):
    """Takes actions under a key that is no string."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.taken = space

    def step(self, action: Any) -> Any:
        assert self.taken.contains(action)
        return super().step(action[7])


class TestValues:
    """Values that don't fit."""

    @pytest.mark.parametrize("seen", [np.array([0.5, 1.0]), np.array([7, 256])])
    def test_another_data_type(self, seen: Any) -> None:
        make = partial(Odd, S.Box(0, 255, (2,), np.uint8), seen)
        message = refusal(make)
        assert "convert it in a gymnasium.ObservationWrapper, or make the space" in message
        kind = shown(message, "a Box of")
        spacious = gather(partial(Odd, S.Box(0, 255, (2,), np.dtype(kind)), seen))
        assert (spacious["observation"] == torch.from_numpy(seen)).all()

        class Converted(gym.ObservationWrapper[Any, Any, Any]):
            def observation(self, observation: Any) -> Any:
                return observation.astype(np.uint8)

        assert (gather(lambda: Converted(make()))["observation"][..., 1] == seen[1] % 256).all()

    @pytest.mark.parametrize("seen", [None, "a text", np.array([1, None]), np.zeros(2, complex)])
    def test_no_numbers(self, seen: Any) -> None:
        message = refusal(partial(Odd, BOX, seen))
        assert "return numbers, or make some of it in a gymnasium.ObservationWrapper" in message

        class Numbers(gym.ObservationWrapper[Any, Any, Any]):
            def observation(self, observation: Any) -> Any:
                return ZEROS

        gather(lambda: Numbers(Odd(BOX, seen)))

    def test_a_reward_that_is_too_large(self) -> None:
        make = partial(Odd, BOX, ZEROS, 1e39)
        assert "scale it with gymnasium.wrappers.TransformReward" in refusal(make)
        scaled = gather(lambda: wrappers.TransformReward(make(), lambda reward: reward / 1e39))
        assert (scaled["next", "reward"] == 1).all()

    def test_a_vector_of_rewards(self) -> None:
        make = partial(Odd, BOX, ZEROS, np.array([1.0, 2.0]))
        message = refusal(make)
        assert "the reward array([1., 2.]); expected one number" in message
        assert "gymnasium.wrappers.TransformReward(env, sum)" in message
        assert (gather(lambda: wrappers.TransformReward(make(), sum))["next", "reward"] == 3).all()

    @pytest.mark.parametrize("reward", [1j, "1.5", None, np.ma.masked])
    def test_a_reward_that_is_no_number(self, reward: Any) -> None:
        make = partial(Odd, BOX, ZEROS, reward)
        advice = "replace it with gymnasium.wrappers.TransformReward(env, make), where make returns"
        assert advice in refusal(make)
        made = gather(lambda: wrappers.TransformReward(make(), lambda _: 1.5))
        assert (made["next", "reward"] == 1.5).all()

    def test_an_observation_that_is_too_large(self) -> None:
        make = partial(Odd, BOX, np.array([0, 1e39]))
        assert "scale it with a gymnasium.ObservationWrapper" in refusal(make)

        class Scaled(gym.ObservationWrapper[Any, Any, Any]):
            def observation(self, observation: Any) -> Any:
                return observation / 1e39

        assert (gather(lambda: Scaled(make()))["observation"][..., 1] == 1).all()

    def test_masked_elements(self) -> None:
        make = partial(Odd, BOX, np.ma.array([1.0, 2.0], mask=[False, True]))
        message = refusal(make)
        assert "fill them (numpy.ma.filled) in a gymnasium.ObservationWrapper" in message

        class Filled(gym.ObservationWrapper[Any, Any, Any]):
            def observation(self, observation: Any) -> Any:
                return np.ma.filled(observation, -1)

        assert (gather(lambda: Filled(make()))["observation"][..., 1] == -1).all()

    def test_an_action_that_the_space_does_not_have(self) -> None:
        message = refusal(EchoEnv, marked(action=3))
        assert "let the policy have as many actions" in message
        gather(EchoEnv, categorical(num_actions=3))


class Talker(nn.Module):
    """Chooses an action, and says why."""

    def forward(self, observation: Tensor) -> Any:
        return torch.ones(observation.shape[:-1], dtype=torch.int64), "a text"


class TestEntries:
    """Entries that a batch can't hold, or lacks."""

    @pytest.mark.parametrize("what", ["text", "ragged"])
    def test_of_an_environment(self, what: str) -> None:
        make = partial(Spoken, "spec", what)
        assert "leave it out with torchrl.envs.ExcludeTransform('said')" in refusal(make)
        batch = gather(lambda: TransformedEnv(make(), ExcludeTransform("said")))
        assert "said" not in batch

    def test_at_a_depth(self) -> None:
        spec = Composite(deep=NonTensor(()))

        def make(*without: Any) -> Any:
            says = Says(TensorDict(deep="x"), spec)
            return TransformedEnv(Spoken("spec", "tensor"), Compose(says, *without))

        assert "ExcludeTransform(('said', 'deep'))" in refusal(make)
        gather(partial(make, ExcludeTransform(("said", "deep"))))

    def test_without_a_spec(self) -> None:
        def make(spec: TensorSpec | None = None) -> Any:
            return TransformedEnv(GymWrapper(EchoEnv()), Says(torch.ones(3), spec))

        policy = TensorDictModule(OneHot(), ["observation"], ["action"])
        message = refusal(make, policy)
        assert "in the transform's transform_observation_spec" in message
        assert (gather(partial(make, Unbounded((3,))), policy)["next", "said"] == 1).all()
        assert "add it to the environment's observation_spec" in message
        gather(partial(Spoken, "spec", "tensor"))

    def test_of_a_policy(self) -> None:
        def policy() -> TensorDictModule:
            return TensorDictModule(Talker(), ["observation"], ["action", "why"])

        message = refusal(EchoEnv, policy())
        assert "the policy's entry 'why' is a NonTensorData" in message
        assert "leave it out with policy.select_out_keys" in message
        gather(EchoEnv, policy().select_out_keys("action"))

    def test_of_a_gymnasium_environment(self) -> None:
        make = partial(Odd, S.Dict(observation=BOX), {"observation": ZEROS, "more": ZEROS})
        message = refusal(make)
        assert "returned an observation with 'more', which its observation space does" in message
        assert "gymnasium.wrappers.FilterObservation(env, ['observation'])" in message
        gather(lambda: wrappers.FilterObservation(make(), ["observation"]))
        assert "add it to the space" in message
        space = S.Dict(observation=BOX, more=BOX)
        assert "more" in gather(partial(Odd, space, {"observation": ZEROS, "more": ZEROS}))


class OneHot(nn.Module):
    """The action that TorchRL's wrapper expects of a Discrete space."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.eye(3, dtype=torch.int64)[
            torch.ones(observation.shape[:-1], dtype=torch.int64)
        ]
