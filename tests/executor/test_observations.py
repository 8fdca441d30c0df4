"""Observations with entries that batches lack: what is said of them, and that its advice works."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from torchrl_hts._executor.observations import ObservationReader, observation_fields
from torchrl_hts.errors import InvalidValueError

BOX = Box(0, 1, (2,), np.float32)


class Nested(gym.Env[Any, Any]):
    """Observes what its space has, and something more below a key, or at the root."""

    action_space = Discrete(2)

    def __init__(self, deep: bool) -> None:
        self.observation_space = Dict(a=BOX, n=Dict(y=BOX))
        self.deep = deep

    def reset(self, **kwargs: Any) -> Any:
        seen = self.observation_space.sample()
        (seen["n"] if self.deep else seen)["more"] = np.zeros(2)
        return seen, {}


class NestedBatch(VectorEnv[Any, Any, Any]):
    """Two of them, in an engine of its own."""

    def __init__(self, deep: bool) -> None:
        self.num_envs, self.metadata = 2, {"autoreset_mode": AutoresetMode.DISABLED}
        one = Nested(deep)
        self.single_observation_space: Any = one.observation_space
        self.single_action_space = one.action_space
        self.observation_space = batch_space(one.observation_space, 2)
        self.action_space = batch_space(one.action_space, 2)
        self.deep = deep

    reset = Nested.reset  # type: ignore[assignment]


class TestAdvice:
    """What takes an entry out that no batch is to have, as the message says and as it works."""

    def refusal(self, env: Any, *lead: int) -> str:
        reader = ObservationReader(Dict(a=BOX, n=Dict(y=BOX)))
        with pytest.raises(InvalidValueError) as caught:
            reader.read(env.reset()[0], *lead)
        return str(caught.value)

    def taken(self, env: Any, *lead: int) -> None:
        reader = ObservationReader(Dict(a=BOX, n=Dict(y=BOX)))
        assert len(reader.read(env.reset()[0], *lead)) == 2

    def test_at_the_root(self) -> None:
        said = "with 'more', which.*take it out with "
        line = r"gymnasium.wrappers.FilterObservation\(env, \['a', 'n'\]\)$"
        assert re.search(said + line, self.refusal(Nested(False)))
        self.taken(wrappers.FilterObservation(Nested(False), ["a", "n"]))
        line = r"gymnasium.wrappers.vector.FilterObservation\(env, \['a', 'n'\]\)$"
        assert re.search(said + line, self.refusal(NestedBatch(False), 2))
        self.taken(wrappers.vector.FilterObservation(NestedBatch(False), ["a", "n"]), 2)

    def test_below_a_key(self) -> None:
        def take(seen: Any) -> Any:
            return {"a": seen["a"], "n": {"y": seen["n"]["y"]}}

        said = "with 'more' below 'n', which.*take it out with gymnasium.wrappers."
        env = Nested(True)
        assert re.search(said + "TransformObservation$", self.refusal(env))
        self.taken(wrappers.TransformObservation(env, take, env.observation_space))
        batch = NestedBatch(True)
        assert re.search(said + "vector.TransformObservation$", self.refusal(batch, 2))
        self.taken(wrappers.vector.TransformObservation(batch, take), 2)

    def test_several_of_unsupported_spaces(self) -> None:
        """None of them is among those to keep."""
        odd = gym.spaces.Text(3)
        space = Dict(a=BOX, n=Dict(y=BOX), odd=odd, deep=Dict(odd=odd))
        with pytest.raises(TypeError, match=r"FilterObservation\(env, \['a', 'n'\]\)"):
            observation_fields(space)
        with pytest.raises(TypeError, match=r"Make an array of it with .*TransformObservation$"):
            observation_fields(Dict(odd=odd, other=odd))
