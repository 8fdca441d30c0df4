"""The words for spaces: the same for the same space, others for another one."""

from __future__ import annotations

import json
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from space_environments import OfSpaces, OfSpecs
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)

from torchrl_hts.testing import spaces_of

RAMP = np.linspace(0, 1, 84 * 84 * 4, dtype=np.float32).reshape(84, 84, 4)


class Own(Box):
    """Of somebody's own, shown with its address."""

    def __repr__(self) -> str:
        return object.__repr__(self)


class Odd(gym.Space[Any]):
    """Of no kind that is known."""


SPACES = [
    (Box(-1, 1, (2,)), Box(-2, 2, (2,))),
    (Box(-np.inf, np.inf, (2,), np.float64), Box(-np.inf, 5, (2,), np.float64)),
    (Box(-1, 1, (2,)), Box(-1, 1, (3,))),
    (Box(-1, 1, (2,)), Box(-1, 1, (2,), np.float64)),
    (Box(0, 255, (84, 84, 4), np.uint8), Box(0, 254, (84, 84, 4), np.uint8)),
    (Box(-RAMP, RAMP), Box(-RAMP, RAMP[::-1])),
    (Own(-1, 1, (2,)), Own(-2, 2, (2,))),
    (Discrete(2), Discrete(2, start=5)),
    (Discrete(2), Discrete(3)),
    (MultiDiscrete([2, 3]), MultiDiscrete([3, 2])),
    (MultiDiscrete([2, 3]), MultiDiscrete([2, 3], start=[0, 1])),
    (MultiBinary(3), MultiBinary(4)),
    (Dict(a=Box(0, 1), b=Discrete(2)), Dict(a=Box(0, 1), b=Discrete(2, start=1))),
    (Dict(a=Box(0, 1), b=Discrete(2)), Dict(a=Box(0, 1))),
    (Tuple((Discrete(2), Text(3))), Tuple((Discrete(3), Text(3)))),
    (Sequence(Discrete(2)), Discrete(2)),
    (Odd(), Discrete(2)),
]


@pytest.mark.parametrize(("space", "other"), SPACES)
def test_spaces_of_gymnasium(space: gym.Space[Any], other: gym.Space[Any]) -> None:
    def texts(of: gym.Space[Any]) -> dict[str, str]:
        return spaces_of(OfSpaces(of, Discrete(2)))

    found = texts(space)
    assert found == texts(pickle.loads(pickle.dumps(space))) != texts(other)
    assert json.loads(json.dumps(found)) == found
    assert max(map(len, found.values())) < 100


SPECS = [
    (Bounded(-1, 1, (2,)), Bounded(-2, 2, (2,))),
    (Unbounded((2,)), Unbounded((2,), dtype=torch.float64)),
    (Unbounded((2,)), Bounded(-1, 1, (2,))),
    (Unbounded((2,), dtype=torch.bfloat16), Unbounded((2,), dtype=torch.int64)),
    (Categorical(3), Categorical(4)),
    (OneHot(3), OneHot(4)),
    (MultiOneHot([2, 3]), MultiOneHot([3, 2])),
    (MultiCategorical([2, 3]), MultiCategorical([3, 2])),
    (Binary(3), Binary(4)),
]


@pytest.mark.parametrize(("spec", "other"), SPECS)
def test_specs_of_torchrl(spec: Any, other: Any) -> None:
    texts = [
        spaces_of(OfSpecs(Unbounded((2,)), each))["action spec 'action'"]
        for each in (spec, spec.clone(), other)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_what_wrappers_hide() -> None:
    env = gym.wrappers.ClipAction(OfSpaces(Dict(a=Box(0, 1, (2,))), Box(-1, 1, (1,))))
    texts = spaces_of(gym.wrappers.FlattenObservation(env))
    assert texts["observation space"] == "Box(0, 1, (2,), float32)"
    assert texts["observation space within the wrappers"] == "Dict('a')"
    assert texts["action space"] == "Box(-inf, inf, (1,), float32)"
    assert texts["action space within the wrappers"] == "Box(-1, 1, (1,), float32)"
