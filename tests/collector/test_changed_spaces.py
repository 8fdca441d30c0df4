"""A state of environments whose spaces were others is refused, before anything is collected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import ClipAction, FlattenObservation
from space_environments import OfSpaces, OfSpecs
from torchrl.data import Bounded, OneHot, Unbounded
from torchrl.envs import GymWrapper

from torchrl_hts import HTSCollector
from torchrl_hts.envs import make_in_thread
from torchrl_hts.testing import digest, spaces_of

pytestmark = pytest.mark.usefixtures("nothing_left")

SEEN, ACTS = Box(-1, 1, (2,)), Box(-1, 1, (1,))
START = partial(OfSpaces, SEEN, Discrete(2, start=5))


def clipped(observation: gym.Space[Any], action: gym.Space[Any]) -> gym.Env[Any, Any]:
    """As `ppo_mujoco.py` has its environments."""
    return ClipAction(FlattenObservation(OfSpaces(observation, action)))


def batch(*spaces: gym.Space[Any]) -> SyncVectorEnv:
    """Of two environments that step as one."""
    return SyncVectorEnv([partial(clipped, *spaces)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


def wrapped(*spaces: gym.Space[Any]) -> GymWrapper:
    """TorchRL's."""
    return GymWrapper(clipped(*spaces))


def threaded(*spaces: gym.Space[Any]) -> gym.Env[Any, Any]:
    """In a thread."""
    return make_in_thread(partial(clipped, *spaces))


def collector(make_env: Callable[[], Any]) -> HTSCollector:
    options = {"num_executors": 1, "num_actors": 1, "frames_per_batch": 8, "total_frames": 32}
    return HTSCollector([make_env] * 2, None, seed=0, **options)


def state_of(make_env: Callable[[], Any]) -> tuple[dict[str, Any], list[str]]:
    """A state, and the batches that come after it."""
    with collector(make_env) as data:
        batches = iter(data)
        next(batches)
        state = data.state_dict()
        assert state["spaces"] == data.spaces
        return state, [digest(batch) for batch in batches]


@pytest.mark.parametrize(
    ("make_env", "now", "said"),
    [
        (
            partial(OfSpaces, SEEN, Discrete(2)),
            START,
            r"action space was Discrete\(2, start=0, int64\); here it is Discrete\(2, start=5",
        ),
        (
            partial(OfSpaces, SEEN, ACTS),
            partial(OfSpaces, Box(-9, 9, (2,)), ACTS),
            r"observation space was Box\(-1, 1, \(2,\), float32\); here it is Box\(-9, 9",
        ),
        *(
            (
                partial(make, SEEN, ACTS),
                partial(make, SEEN, Box(-2, 2, (1,))),
                r"action space within the wrappers was Box\(-1, 1, .* is Box\(-2, 2",
            )
            for make in (clipped, batch, wrapped, threaded)
        ),
        (
            partial(clipped, SEEN, ACTS),
            partial(clipped, Dict(a=SEEN), ACTS),
            r"observation space within the wrappers was Box\(-1, .* is Dict\('a'\)\. Go on with",
        ),
        (
            partial(OfSpecs, Unbounded((2,)), Bounded(-1, 1, (2,))),
            partial(OfSpecs, Unbounded((2,)), Bounded(-2, 2, (2,))),
            r"action spec 'action' was BoundedContinuous\(-1, 1, .* is BoundedContinuous\(-2, 2",
        ),
    ],
    ids=["start", "seen", "clipped", "batch", "wrapped", "threaded", "dict", "specs"],
)
def test_a_state_of_other_spaces_is_refused(
    make_env: Callable[[], Any], now: Callable[[], Any], said: str
) -> None:
    state, _ = state_of(make_env)
    with collector(now) as data, pytest.raises(ValueError, match=f"environments whose {said}"):
        data.load_state_dict(state)


@pytest.mark.parametrize(
    ("make_env", "now"),
    [
        (START, START),
        (*[partial(clipped, Tuple((Discrete(2), SEEN)), ACTS)] * 2,),
        (*[partial(OfSpaces, Dict(a=SEEN, b=Box(-np.inf, np.inf, (), np.float64)), ACTS)] * 2,),
        (*[partial(batch, SEEN, ACTS)] * 2,),
        (*[partial(threaded, SEEN, ACTS)] * 2,),
        (*[partial(OfSpecs, Unbounded((2,)), OneHot(3))] * 2,),
    ],
    ids=["start", "tuple", "dict", "batch", "threaded", "specs"],
)
def test_a_state_of_the_same_spaces_goes_on(
    make_env: Callable[[], Any], now: Callable[[], Any]
) -> None:
    state, coming = state_of(make_env)
    with collector(now) as data:
        data.load_state_dict(state)
        assert [digest(batch) for batch in data] == coming


def test_environments_may_differ_within_their_wrappers() -> None:
    factories = [partial(clipped, SEEN, ACTS), partial(clipped, SEEN, Box(-2, 2, (1,)))]
    for order in (factories, factories[::-1]):
        with HTSCollector(order, None, frames_per_batch=8, num_executors=1, seed=0) as data:
            next(iter(data))
            state = data.state_dict()
            data.load_state_dict(state)
    assert "action space" in state["spaces"]
    assert "action space within the wrappers" not in state["spaces"]


def test_a_state_of_an_older_version_is_not_asked() -> None:
    state, _ = state_of(START)
    assert state.pop("spaces") == spaces_of(START())
    with collector(partial(OfSpaces, SEEN, Discrete(2))) as data:
        data.load_state_dict(state)
        state["spaces"] = [1]
        with pytest.raises(TypeError, match=r"state_dict\['spaces'\] can't be a list"):
            data.load_state_dict(state)
