"""How many executors and actors there are by default, as a function of what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_hts._planning.costs import (
    PassCosts,
    StepCosts,
    TeamSize,
    actors_for,
    executors_for,
    team_for,
)

PONG = StepCosts(0.28e-3, 1.0)
FOOTBALL = StepCosts(4.5e-3, 1.0)
NOTHING = StepCosts(1e-6, 1.0)
SLEEP = StepCosts(10e-3, 0.01)
CNN = PassCosts((1, 64), (0.3e-3, 0.2e-3 * 64))
MLP = PassCosts((1, 64), (60e-6, 120e-6))


@pytest.mark.parametrize(
    ("step_s", "cpu_share", "num_envs", "cores", "expected"),
    [
        (0.7e-3, 1.0, 16, 2, 2),  # computes: a core each
        (0.7e-3, 1.0, 16, 32, 16),
        (10e-3, 0.01, 16, 2, 16),  # sleeps: an environment each
        (10e-3, 0.2, 1000, 2, 10),  # ... or as many as keep the cores busy
        (10e-3, 0.0, 1000, 2, 64),  # ... and no more than the memory of a machine bears
        (10e-3, 0.25, 64, 2, 8),
        (10e-3, 0.0, 4, 1, 4),
        (1e-6, 1.0, 16, 8, 1),  # costs nothing: one keeps up
        (20e-6, 0.0, 16, 8, 2),  # ... what a coarse clock says of it doesn't matter
        (6e-6, 1.0, 64, 8, 5),
        (1e-6, 1.0, 1, 8, 1),
        (20e-6, 1.0, 16, 2, 1),  # cheap: a core is left to the actor, and nobody has to sleep
        (20e-6, 1.0, 64, 4, 3),
        (80e-6, 1.0, 16, 2, 2),  # ... which doesn't pay any more
        (20e-6, 1.0, 16, 1, 1),
    ],
)
def test_as_many_as_pay(
    step_s: float, cpu_share: float, num_envs: int, cores: int, expected: int
) -> None:
    assert executors_for(StepCosts(step_s, cpu_share), num_envs, cores) == expected


@pytest.mark.parametrize(
    ("cpu_share", "num_envs", "expected"), [(0.01, 32, 1), (0.0, 32, 1), (0.1, 32, 7), (0.4, 64, 8)]
)
def test_no_more_than_keep_up_where_steps_overlap(
    cpu_share: float, num_envs: int, expected: int
) -> None:
    costs = StepCosts(10e-3, cpu_share, overlaps=True)
    assert executors_for(costs, num_envs, 3) == expected
    # An actor sees them all within the time of a step.
    passes = PassCosts((1, 64), (0.2e-3, 12.8e-3))
    alone = StepCosts(10e-3, 0.01)
    overlapping = StepCosts(10e-3, 0.01, overlaps=True)
    sizes = [team_for(costs, 64, 16, lambda: passes) for costs in (alone, overlapping)]
    assert sizes[0].actors == sizes[1].actors == 3


@pytest.mark.parametrize(
    ("step_s", "inference_s", "cores", "expected"),
    [
        (0.28e-3, 0.17e-3, 2, 1),  # Pong and the Nature CNN: the other core is the actor's
        (4.5e-3, 0.2e-3, 2, 2),  # football: inference is no work beside that
        (1e-3, 1e-3, 16, 8),
        (1e-3, 1.0, 16, 1),
        (1e-6, 1e-6, 16, 1),
    ],
)
def test_inference_has_its_share_of_the_cores(
    step_s: float, inference_s: float, cores: int, expected: int
) -> None:
    assert executors_for(StepCosts(step_s, 1.0), 16, cores, inference_s) == expected
    waits = StepCosts(10e-3, 0.01)
    assert executors_for(waits, 16, cores, inference_s) == 16, "they leave the cores alone"


@pytest.mark.parametrize(
    ("costs", "passes", "num_envs", "cores", "expected"),
    [
        (PONG, CNN, 16, 2, TeamSize(1, 1)),
        (PONG, CNN, 16, 4, TeamSize(2, 2)),
        (PONG, CNN, 64, 16, TeamSize(9, 7)),
        (FOOTBALL, CNN, 16, 2, TeamSize(2, 1)),
        (FOOTBALL, CNN, 64, 16, TeamSize(15, 1)),
        (PONG, MLP, 16, 8, TeamSize(8, 1)),
        (NOTHING, MLP, 16, 64, TeamSize(1, 1)),  # one pass answers all in half of their time
        (NOTHING, CNN, 16, 8, TeamSize(1, 7)),
        (SLEEP, CNN, 64, 2, TeamSize(64, 1)),  # the other core is the learner's
        (SLEEP, CNN, 16, 16, TeamSize(16, 1)),
        (SLEEP, CNN, 64, 16, TeamSize(64, 3)),
        (SLEEP, MLP, 64, 16, TeamSize(64, 1)),
    ],
)
def test_executors_and_actors(
    costs: StepCosts, passes: PassCosts, num_envs: int, cores: int, expected: TeamSize
) -> None:
    assert team_for(costs, num_envs, cores, lambda: passes) == expected
    assert team_for(costs, num_envs, cores, lambda: None) == TeamSize(
        executors_for(costs, num_envs, cores), 1
    ), "what takes nothing of the cores, or can't be timed"


def test_threads_of_actors_count() -> None:
    assert team_for(NOTHING, 16, 9, lambda: CNN, actor_threads=4) == TeamSize(1, 2)
    assert team_for(NOTHING, 16, 2, lambda: CNN, actor_threads=4) == TeamSize(1, 1)


def test_actors_that_would_not_help_are_not_there() -> None:
    """A pass that takes as long for one row as for all."""
    constant = PassCosts((1, 16), (5e-3, 5e-3))
    assert actors_for(NOTHING, 16, 1, cores=15, passes=constant) == 1


def test_passes_are_timed_only_where_it_matters() -> None:
    def never() -> None:
        raise AssertionError

    for costs in (NOTHING, SLEEP):
        team_for(costs, 16, 2, never)
        assert team_for(costs, 16, 8, never, num_actors=3).actors == 3
    for costs, cores in ((PONG, 2), (NOTHING, 3), (SLEEP, 3)):
        with pytest.raises(AssertionError):
            team_for(costs, 16, cores, never)


def test_actors_that_are_given_leave_the_executors_their_cores() -> None:
    assert team_for(PONG, 16, 8, lambda: CNN, num_actors=1) == TeamSize(5, 1)


@given(
    st.builds(StepCosts, st.floats(0, 100), st.floats(0, 1)),
    st.integers(1, 2048),
    st.integers(1, 512),
    st.floats(0, 100),
    st.floats(1, 100),
    st.integers(1, 8),
)
def test_at_least_one_and_no_more_than_environments_or_cores(
    costs: StepCosts, num_envs: int, cores: int, pass_s: float, factor: float, threads: int
) -> None:
    passes = PassCosts((1, num_envs), (pass_s, pass_s * factor)) if num_envs > 1 else None
    team = team_for(costs, num_envs, cores, lambda: passes, actor_threads=threads)
    assert 1 <= team.executors <= num_envs
    assert 1 <= team.actors <= num_envs
    busy = team.actors * threads + (0 if costs.waits else team.executors)
    assert team.actors == 1 or busy <= cores
