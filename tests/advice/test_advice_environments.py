"""Advice about what environments observe, take, pay and are made of, followed."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from advised import BOX, ZEROS, Odd, Says, gather, pasted, refusal, shown
from collectors import start
from environments import EchoEnv
from gymnasium import wrappers
from policies import categorical, marked
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Unbounded
from torchrl.envs import Compose, GymEnv, GymWrapper, StepCounter, TransformedEnv
from torchrl.modules.tensordict_module.exploration import RandomPolicy
from torchrl_environments import Clocks, Spoken, Square

S = gym.spaces
pytestmark = pytest.mark.usefixtures("warm_servers")

TEXT = S.Text(5)
SENTENCE = S.Sequence(BOX)
GRAPH = S.Graph(BOX, None)


class Firsts(nn.Module):
    """Acts by the first output of a network."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_inputs, 1)

    def forward(self, observation: Tensor) -> Tensor:
        return (self.layer(observation)[..., 0] > 0).long()


class TestSpaces:
    """Spaces that have no fixed array shape."""

    @pytest.mark.parametrize("space", [TEXT, SENTENCE, GRAPH, S.Tuple([TEXT, SENTENCE])], ids=repr)
    def test_in_a_dict(self, space: gym.Space[Any]) -> None:
        seen = {"observation": ZEROS, "odd": "text"}
        make = partial(Odd, S.Dict(observation=BOX, odd=space), seen)
        message = refusal(make)
        assert f"'odd' is a {type(space).__name__} space; supported are Box" in message
        assert "Leave it out with gymnasium.wrappers.FilterObservation(env, ['observation'])" in (
            message
        )
        gather(lambda: wrappers.FilterObservation(make(), ["observation"]))

    @pytest.mark.parametrize("space", [TEXT, S.Dict(a=S.Dict(b=GRAPH))], ids=repr)
    def test_without_others_beside_it(self, space: gym.Space[Any]) -> None:
        make = partial(Odd, space, "text")
        assert "Make an array of it with gymnasium.wrappers.TransformObservation" in refusal(make)
        gather(lambda: wrappers.TransformObservation(make(), lambda _: ZEROS, BOX))

    @pytest.mark.parametrize(
        ("space", "seen"),
        [
            (S.Tuple([BOX, S.Discrete(2)]), (ZEROS, 1)),
            (S.OneOf([BOX, S.Discrete(2)]), (0, ZEROS)),
            (S.Dict(a=S.Tuple([BOX, S.Discrete(2)]), b=BOX), {"a": (ZEROS, 1), "b": ZEROS}),
            (S.Tuple([S.Discrete(2), S.Discrete(3)]), (1, 2)),
            (S.Tuple([BOX, BOX]), (ZEROS, ZEROS)),
        ],
        ids=repr,
    )
    def test_that_can_be_flattened(self, space: gym.Space[Any], seen: Any) -> None:
        """So that a network takes it at once."""
        make = partial(Odd, space, seen)
        line = shown(refusal(make), after="Flatten it with")
        assert ("DtypeObservation" in line) == (S.flatten_space(space).dtype != np.float32)
        network = TensorDictModule(Firsts(S.flatdim(space)), ["observation"], ["action"])
        gather(lambda: pasted(line, make()), network)

    def test_beside_what_cannot_be_flattened(self) -> None:
        parts = {"a": S.Tuple([BOX, S.Discrete(2)]), "b": S.Graph(BOX, None), "c": BOX}
        make = partial(Odd, S.Dict(parts), {"a": (ZEROS, 1), "b": None, "c": ZEROS})
        assert "Leave it out with" in refusal(make)

    def test_of_actions(self) -> None:
        class Pairs(Odd):
            def step(self, action: Any) -> Any:
                return super().step(action[0])

        def make() -> Any:
            env = Pairs(BOX, ZEROS)
            return wrappers.TransformAction(env, lambda a: a, S.Tuple([S.Discrete(3)]))

        for policy in (marked(), RandomPolicy(None)):
            message = refusal(make, policy)
            assert "the action space has a Tuple" in message
            assert "Turn it into one of these with gymnasium.wrappers.TransformAction" in message
            gather(lambda: wrappers.TransformAction(make(), lambda a: (a,), S.Discrete(3)), policy)

    def test_a_vector_of_environments(self) -> None:
        class Blind(gym.vector.VectorEnv):  # type: ignore[type-arg]
            num_envs = 2
            single_observation_space = S.Box(0, 1, (4,))
            observation_space = S.Box(0, 1, (2, 4))
            single_action_space, action_space = S.Discrete(3), S.MultiDiscrete([3, 3])

        message = refusal(Blind)
        assert "with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP" in message
        gather(lambda: gym.vector.SyncVectorEnv([EchoEnv], autoreset_mode="SameStep"))
        make = partial(gym.make_vec, "CartPole-v1", 2)  # whose class takes no autoreset_mode
        assert "gymnasium.make_vec(..., vectorization_mode='sync')" in refusal(make)
        gather(partial(make, vectorization_mode="sync"), categorical(num_actions=2))


class TestEnvironments:
    """What a factory makes, and how long episodes are."""

    def test_a_name(self) -> None:
        with pytest.raises(TypeError) as caught:
            start("CartPole-v1", categorical())  # type: ignore[arg-type]
        line = shown(str(caught.value), "such as")
        gather(eval(line, {"functools": functools, "gymnasium": gym}), categorical(num_actions=2))

    def test_a_batch_of_environments(self) -> None:
        policy = categorical(4, num_actions=2)
        message = refusal(Square, policy)
        assert "give several batches as entries of their own" in message
        batch = partial(Clocks, 2, 3)
        assert gather(batch, categorical(3), copies=3).shape[0] == 3 * 2

    def test_a_vector_of_environments_in_torchrl(self) -> None:
        policy = categorical(4, num_actions=2)
        make = partial(GymEnv, "CartPole-v1", num_envs=2, categorical_action_encoding=True)
        message = refusal(make, policy)
        assert "make the gymnasium.vector.VectorEnv itself, without TorchRL's wrapper" in message
        assert "with autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED" in message
        one = partial(gym.make, "CartPole-v1")
        assert gather(lambda: gym.vector.AsyncVectorEnv([one] * 2), policy).shape[0] == 2

        def wrapped() -> Any:
            mode = gym.vector.AutoresetMode.DISABLED
            envs = gym.vector.AsyncVectorEnv([one] * 2, autoreset_mode=mode)
            return GymWrapper(envs, categorical_action_encoding=True)

        assert gather(wrapped, policy).shape[0] == 2

    def test_steps_that_are_counted_already(self) -> None:
        def make() -> Any:
            return TransformedEnv(Spoken("none", "text"), StepCounter())

        message = refusal(make, max_frames_per_traj=3)
        assert "set max_frames_per_traj=0, or remove its StepCounter" in message
        gather(make, max_frames_per_traj=0)
        gather(partial(Spoken, "none", "text"), max_frames_per_traj=3)

    def test_no_number_where_there_is_one_to_replace(self) -> None:
        make = partial(Odd, BOX, np.array([0, np.nan], np.float32))
        assert "replace it with a gymnasium.ObservationWrapper" in refusal(make)
        gather(lambda: wrappers.TransformObservation(make(), np.nan_to_num, BOX))
        paid = partial(Odd, BOX, ZEROS, np.float32("nan"))
        assert "gymnasium.wrappers.TransformReward(env, numpy.nan_to_num)" in refusal(paid)
        rewards = gather(lambda: wrappers.TransformReward(paid(), np.nan_to_num))
        assert (rewards["next", "reward"] == 0).all()
        spoken = partial(TransformedEnv, Spoken("none", "text"))
        says = Says(torch.full((2,), torch.nan), Unbounded((2,)))
        assert "replace it with a transform" in refusal(lambda: spoken(Compose(says)))
        gather(lambda: spoken(Compose(says, Says(torch.zeros(2), Unbounded((2,))))))
