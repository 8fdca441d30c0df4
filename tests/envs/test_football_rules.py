"""When a game of football ends, and what it pays: the rules alone, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from football_installed import need

from torchrl_hts.envs.football_rules import SCENARIOS, Moment, Referee

DRILL = SCENARIOS["academy_empty_goal_close"]
MATCH = SCENARIOS["11_vs_11_stochastic"]


def test_scenarios_end_as_gfootballs_do() -> None:
    need("gfootball")
    from gfootball.env.config import Config

    for name, scenario in SCENARIOS.items():
        config = Config({"level": name, "game_engine_random_seed": 0}).ScenarioConfig()
        assert scenario.duration == config.game_duration
        assert scenario.ends_on_score == config.end_episode_on_score
        assert scenario.ends_out_of_play == config.end_episode_on_out_of_play
        assert scenario.ends_on_possession_change == config.end_episode_on_possession_change


def moment(**changes: Any) -> Moment:
    """A moment of a game in which nothing happens, but for the changes."""
    quiet = {"score": (0, 0), "game_mode": 0, "ball_owned_team": 0, "steps_left": 100}
    return Moment(**{**quiet, "ball": (0.0, 0.0), "has_ball": (False,), **changes})


@pytest.mark.parametrize(
    ("change", "in_drill", "in_match"),
    [
        ({}, (False, False), (False, False)),
        ({"score": (1, 0)}, (True, False), (False, False)),
        ({"score": (0, 1)}, (True, False), (False, False)),
        ({"game_mode": 3}, (True, False), (False, False)),
        ({"ball_owned_team": 1}, (True, False), (False, False)),
        ({"ball_owned_team": -1}, (False, False), (False, False)),
        ({"steps_left": 0}, (False, True), (False, True)),
        ({"steps_left": 0, "score": (1, 0)}, (True, False), (False, True)),
    ],
)
def test_the_rules_terminate_and_the_clock_truncates(
    change: dict[str, Any], in_drill: tuple[bool, bool], in_match: tuple[bool, bool]
) -> None:
    for scenario, expected in ((DRILL, in_drill), (MATCH, in_match)):
        referee = Referee(scenario, 1)
        referee.judge(moment())
        verdict = referee.judge(moment(**change))
        assert (verdict.terminated, verdict.truncated) == expected


def test_a_ball_that_nobody_had_in_between_still_changes_hands() -> None:
    referee = Referee(DRILL, 1)
    owners = [-1, 1, -1, 1, 0]
    ends = [referee.judge(moment(ball_owned_team=owner)).terminated for owner in owners]
    assert ends == [False, False, False, False, True]


def test_a_referee_goes_on_from_its_state() -> None:
    referee, other = Referee(DRILL, 2), Referee(DRILL, 2)
    referee.judge(moment(ball=(0.5, 0.0), has_ball=(True, False)))
    other.set_state(referee.get_state())
    for one in (referee, other):
        verdict = one.judge(moment(score=(1, 0), has_ball=(False, False)))
        assert verdict.rewards.tolist() == pytest.approx([1.4, 2.0])
