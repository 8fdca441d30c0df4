"""The states of a run's learners, put together and shared out among another number of them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from policies import categorical
from probe import layout
from ranks import results, run_ranks
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_hts import HTSCollector, World
from torchrl_hts._learner.saved_state import own_state
from torchrl_hts.errors import WorldError
from torchrl_hts.testing import digest

NUM_ENVS, ALPHA = 4, 3


def collector(
    seed: int = 0, batch_size: int | None = None, world: World | None = None
) -> HTSCollector:
    entries = [partial(gym.make, "CartPole-v1")] * NUM_ENVS
    if batch_size is not None:
        batch = partial(gym.make_vec, "CartPole-v1", batch_size, vectorization_mode="sync")
        entries = [batch] * (NUM_ENVS // batch_size)
    return HTSCollector(
        entries,
        categorical(num_actions=2),
        frames_per_batch=NUM_ENVS * ALPHA,
        total_frames=NUM_ENVS * ALPHA * 6,
        seed=seed,
        num_executors=1,
        world=world,
    )


class Run:
    """A collector that has been stopped, and how it would have gone on."""

    def __init__(self, batch_size: int | None = None) -> None:
        with collector(batch_size=batch_size) as data:
            batches = iter(data)
            for _ in range(2):
                next(batches)
            self.state = data.state_dict()
            next(batches)
            self.later = data.state_dict()
            self.coming = [digest(batch) for batch in batches]
            self.policy, self.layout = data.policy, layout(data)

    def own(self, states: Any, rank: int, size: int) -> Any:
        """The share of a learner."""
        count = NUM_ENVS // size
        layout = replace(self.layout, num_envs=count, first_env=rank * count, all_envs=NUM_ENVS)
        if layout.units:
            layout = replace(layout, units=layout.units[: len(layout.units) // size])
        return own_state(states, self.policy, layout, self.state["spaces"])

    def shares(self, states: Any, size: int) -> list[Any]:
        """The shares of all learners."""
        return [self.own(states, rank, size) for rank in range(size)]


@pytest.fixture(scope="module")
def run(warm_servers: None) -> Run:
    return Run()


def same(one: Any, other: Any) -> bool:
    """Whether all is equal, tensors included."""
    if isinstance(one, dict | TensorDictBase):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_any_number_goes_on_with_what_any_other_has_saved(run: Run) -> None:
    four = run.shares(run.state, 4)
    assert [state["first_env"] for state in four] == [0, 1, 2, 3]
    assert {state["frames"] for state in four} == {2 * ALPHA}
    two = run.shares(four, 2)
    assert same(two, run.shares([run.state], 2))
    assert same(run.shares(two[::-1], 4), four)  # in any order
    (whole,) = run.shares(two, 1)
    assert same({key: whole[key] for key in run.state}, dict(run.state))
    assert not same(four[0]["environments"], four[1]["environments"])
    with collector(seed=9) as data:
        data.load_state_dict(two)
        assert [digest(batch) for batch in data][1:] == run.coming


def test_the_spaces_of_each_state_are_looked_at(run: Run) -> None:
    two = run.shares(run.state, 2)
    two[1]["spaces"] = {"action space": "Discrete(2, start=5, int64)"}
    with pytest.raises(ValueError, match=r"action space was Discrete\(2, start=5, int64\); here"):
        run.own(two, 0, 2)


def test_any_number_goes_on_with_batches_that_any_other_has_saved(warm_servers: None) -> None:
    run = Run(batch_size=2)
    two = run.shares(run.state, 2)
    assert [len(state["environments"]) for state in two] == [1, 1]
    assert same([*two[0]["environments"], *two[1]["environments"]], run.state["environments"])
    (whole,) = run.shares(two[::-1], 1)
    assert same({key: whole[key] for key in run.state}, dict(run.state))
    with collector(seed=9, batch_size=2) as data:
        data.load_state_dict(two)
        assert [digest(batch) for batch in data][1:] == run.coming


def test_a_learner_needs_the_states_of_its_own_environments_alone(run: Run) -> None:
    four = run.shares(run.state, 4)
    assert same(run.own(four[2:], 1, 2), run.own(four, 1, 2))
    assert run.own(four[3], 3, 4) is four[3]  # its own


def test_environments_that_are_lost_in_one_state_begin_anew_in_all(run: Run) -> None:
    first, second = run.shares(run.state, 2)
    second = {**second, "environments": None, "why_environments_are_lost": "a file"}
    whole = run.own([first, second], 0, 1)
    assert whole["environments"] is None
    assert whole["why_environments_are_lost"] == "a file"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run, two: two[:1], "with num_envs=2; this one has num_envs=4"),
        (lambda run, two: [two[1], two[1]], "lack some of the environments 0 to 3"),
        (lambda run, two: [two[0], *two], "lack some of the environments 0 to 3"),
        (
            lambda run, two: [two[0], run.shares(run.later, 2)[1]],
            "not of one checkpoint: round is 2 in one of them and 3",
        ),
        (lambda run, two: [two[0], {**two[1], "collected": []}], "have collected other rounds"),
        (lambda run, two: [two[0], {**two[1], "first_env": 6}], "environments 6 to 7; this run"),
        (lambda run, two: [two[0], {**two[1], "first_env": -2}], "'first_env'.* must be at least"),
        (lambda run, two: [two[0], {**two[1], "all_envs": 8}], "all_envs=8; this one has all_env"),
        (lambda run, two: [{}, *two], "the state lacks"),
        (lambda run, two: [], "no state"),
    ],
)
def test_what_does_not_fit_together_is_refused(run: Run, change: Any, message: str) -> None:
    states = change(run, run.shares(run.state, 2))
    with pytest.raises(ValueError, match=message):
        run.own(states, 0, 1)


def test_a_state_of_another_learner_is_refused(run: Run) -> None:
    first, second = run.shares(run.state, 2)
    with pytest.raises(ValueError, match="lack some of the environments 0 to 1"):
        run.own(second, 0, 2)
    with pytest.raises(TypeError, match="must be a mapping, got str"):
        run.own(["first", first], 0, 2)


def load_own(cases: bytes) -> list[str]:
    """Each rank its own of some states, one case after the other; returns what was raised."""
    said = []
    with World(timeout_s=60) as world, collector(world=world) as data:
        for states in pickle.loads(cases):
            try:
                data.load_state_dict(states[world.rank])
                said.append("")
            except WorldError as error:
                said.append(str(error))
    return said


def test_the_odd_one_of_learners_that_load_different_checkpoints_is_named(run: Run) -> None:
    """Each state by itself is sound."""
    first, second = run.shares(run.state, 2)
    later = run.shares(run.later, 2)[1]
    policy = {name: value + 1 for name, value in second["policy_state_dict"].items()}
    cases = [(first, later), (first, {**second, "policy_state_dict": policy}), (first, second)]
    for said in results(run_ranks(load_own, 2, pickle.dumps(cases))):
        assert said[0].startswith("rank 1 has round 3, the others 2")
        assert said[1].startswith("rank 1 has policy ")
        assert said[2] == ""
