"""The rules of Google Research Football that need no engine: ends, rewards, pictures, seeds.

Field coordinates are the game's: x from -1 (own goal) to 1 (the opponent's), y from -0.42 to 0.42.
The minimap is what gfootball calls "extracted" or SMM. It has a plane of 72 x 96 cells each for the
left team, the right team, the ball and the controlled player: 255 where one is and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "HEIGHT",
    "SCENARIOS",
    "WIDTH",
    "Moment",
    "Referee",
    "Scenario",
    "Verdict",
    "draw_minimap",
    "engine_seeds",
    "paint",
]

Array = np.ndarray[Any, Any]

WIDTH, HEIGHT = 96, 72  # of the minimap, in cells
_Y_MAX = 1 / 2.25  # the minimap shows y from -_Y_MAX to _Y_MAX
_MARK = 255

_NUM_CHECKPOINTS = 10
_CHECKPOINT_REWARD = 0.1
_NORMAL_MODE = 0  # of the game: the ball is in play
_LARGEST_SEED = 2_000_000_000


@dataclass(frozen=True)
class Scenario:
    """How an episode of a scenario ends.

    Attributes:
        duration: steps after which it is cut off.
        ends_on_score: a goal of either team ends it.
        ends_out_of_play: so does a foul, a corner, ...
        ends_on_possession_change: so does the other team's gaining the ball.
    """

    duration: int
    ends_on_score: bool = False
    ends_out_of_play: bool = False
    ends_on_possession_change: bool = False


_DRILL = Scenario(400, ends_on_score=True, ends_out_of_play=True, ends_on_possession_change=True)
_MATCH = Scenario(3000)

SCENARIOS = {
    "academy_empty_goal_close": _DRILL,
    "academy_empty_goal": _DRILL,
    "academy_run_to_score": _DRILL,
    "academy_run_to_score_with_keeper": _DRILL,
    "academy_pass_and_shoot_with_keeper": _DRILL,
    "academy_run_pass_and_shoot_with_keeper": _DRILL,
    "academy_3_vs_1_with_keeper": _DRILL,
    "academy_corner": Scenario(400, ends_on_score=True, ends_out_of_play=True),
    "academy_counterattack_easy": _DRILL,
    "academy_counterattack_hard": _DRILL,
    "academy_single_goal_versus_lazy": Scenario(3000, True, True, True),
    "11_vs_11_easy_stochastic": _MATCH,
    "11_vs_11_stochastic": _MATCH,
    "11_vs_11_hard_stochastic": _MATCH,
    "5_vs_5": _MATCH,
    "1_vs_1_easy": Scenario(500),
}


@dataclass(frozen=True)
class Moment:
    """What an engine tells of a moment of the game.

    Attributes:
        score: goals of the left and of the right team.
        game_mode: 0 while the ball is in play.
        ball_owned_team: 0 left, 1 right, -1 nobody.
        steps_left: until the episode is cut off.
        ball: x and y.
        has_ball: for each controlled player, whether it has the ball.
    """

    score: tuple[int, int]
    game_mode: int
    ball_owned_team: int
    steps_left: int
    ball: tuple[Any, Any]
    has_ball: tuple[bool, ...]


@dataclass(frozen=True)
class Verdict:
    """What a step was worth, and what it means for the episode.

    Attributes:
        score_reward: 1 for a goal, -1 for one against, else 0.
        rewards: float32 ``[players]``, score and checkpoints together.
        terminated: the rules of the scenario ended the episode.
        truncated: its time is over.
    """

    score_reward: int
    rewards: Array
    terminated: bool
    truncated: bool


class Referee:
    """Rewards and ends of one episode, equal to gfootball's wrappers in every bit.

    Each controlled player collects 0.1 for each of ten rings around the opponent's goal that it
    enters with the ball. For a goal it collects what is left of them (Kurach et al. 2020, section
    3.3).

    Example:
        >>> referee = Referee(SCENARIOS["academy_empty_goal"], num_players=1)
        >>> verdict = referee.judge(Moment((0, 0), 0, 0, 399, (0.1, 0.0), (True,)))
        >>> f"{verdict.rewards[0]:.1f}", verdict.terminated
        ('0.2', False)
        >>> verdict = referee.judge(Moment((1, 0), 0, -1, 380, (1.0, 0.0), (False,)))
        >>> f"{verdict.rewards[0]:.1f}", verdict.terminated
        ('1.8', True)
    """

    def __init__(self, scenario: Scenario, num_players: int) -> None:
        self._scenario = scenario
        self._score = 0  # goals of the left team less those of the right one
        self._game_mode = -1
        self._owner = -1  # the team that had the ball last
        self._collected = [0] * num_players

    def get_state(self) -> tuple[Any, ...]:
        """All that `judge` depends on."""
        return self._score, self._game_mode, self._owner, list(self._collected)

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Go on where `get_state` was called."""
        self._score, self._game_mode, self._owner, collected = state
        self._collected = list(collected)

    def judge(self, moment: Moment) -> Verdict:
        """The next step of the episode, after which the game is at a moment."""
        score = moment.score[0] - moment.score[1]
        score_reward, self._score = score - self._score, score
        terminated = self._ends(moment)
        return Verdict(
            score_reward,
            self._rewards(score_reward, moment),
            terminated,
            truncated=moment.steps_left <= 0 and not terminated,
        )

    def _ends(self, moment: Moment) -> bool:
        rules = self._scenario
        out_of_play = self._game_mode == _NORMAL_MODE != moment.game_mode
        self._game_mode = moment.game_mode
        lost_or_won = moment.ball_owned_team not in (-1, self._owner) and self._owner != -1
        if moment.ball_owned_team != -1:
            self._owner = moment.ball_owned_team
        return (
            (rules.ends_on_score and max(moment.score) > 0)
            or (rules.ends_out_of_play and out_of_play)
            or (rules.ends_on_possession_change and lost_or_won)
        )

    def _rewards(self, score_reward: int, moment: Moment) -> Array:
        rewards = np.full(len(self._collected), score_reward, np.float32)
        for player, collected in enumerate(self._collected):
            if score_reward == 1:
                rewards[player] += _CHECKPOINT_REWARD * (_NUM_CHECKPOINTS - collected)
                self._collected[player] = _NUM_CHECKPOINTS
            elif moment.has_ball[player]:
                x, y = moment.ball
                distance = ((x - 1) ** 2 + y**2) ** 0.5
                while self._collected[player] < _NUM_CHECKPOINTS:
                    ring = 0.99 - 0.8 / (_NUM_CHECKPOINTS - 1) * self._collected[player]
                    if distance > ring:
                        break
                    rewards[player] += _CHECKPOINT_REWARD  # each is rounded, as in gfootball
                    self._collected[player] += 1
        return rewards


def draw_minimap(left: Array, right: Array, ball: Array, active: int) -> Array:
    """A minimap, uint8 ``[4, 72, 96]``.

    Args:
        left, right: ``[players, 2]``, where the players of the teams are.
        ball: ``[2]`` or more.
        active: index of the controlled player in the left team; -1: none.

    Example:
        >>> nobody = np.empty((0, 2))
        >>> plane = draw_minimap(nobody, nobody, np.array([0.0, 0.0]), -1)[2]
        >>> np.argwhere(plane).tolist()
        [[36, 48]]
    """
    minimap = np.zeros((4, HEIGHT, WIDTH), np.uint8)
    controlled = left[active : active + 1] if active != -1 else left[:0]
    for plane, points in zip(minimap, (left, right, ball[None, :2], controlled), strict=True):
        # Towards zero, as int() does; what is outside counts to the cells at the edge.
        column = ((points[:, 0] + 1.0) / 2.0 * WIDTH).astype(int)
        row = ((points[:, 1] + _Y_MAX) / (2 * _Y_MAX) * HEIGHT).astype(int)
        plane[row.clip(0, HEIGHT - 1), column.clip(0, WIDTH - 1)] = _MARK
    return minimap


_PITCH, _LINE = (40, 110, 50), (225, 235, 225)
_COLOURS = ((220, 50, 40), (50, 90, 230), (255, 255, 255), (255, 220, 60))  # of the planes


def paint(minimap: Array, cell: int = 8) -> Array:
    """A picture of a minimap, uint8 ``[72 * cell, 96 * cell, 3]``.

    The left team is red, the right one blue, the ball white and the controlled player yellow.

    Args:
        minimap: uint8 ``[4, 72, 96]``.
        cell: width and height of one of its cells, in pixels.
    """
    picture = np.full((HEIGHT, WIDTH, 3), _PITCH, np.uint8)
    picture[[2, -3], :] = picture[:, WIDTH // 2] = _LINE
    picture[HEIGHT // 2 - 4 : HEIGHT // 2 + 4, [0, -1]] = _LINE  # the goals
    for index in (0, 1, 3, 2):  # the ball is on top
        picture[minimap[index] > 0] = _COLOURS[index]
    return picture.repeat(cell, 0).repeat(cell, 1)


def engine_seeds(seed: int) -> Iterator[int]:
    """The engine seeds that EnvPool draws from its own one, the first for an episode never shown.

    It draws them with ``std::uniform_int_distribution(0, 2_000_000_000)`` from ``std::mt19937``:
    Lemire's method on the words of a Mersenne Twister, which numpy has too.

    Args:
        seed: from 0 to 2**31 - 1.

    Example:
        >>> seeds = engine_seeds(5)
        >>> [next(seeds) for _ in range(3)]
        [443986342, 110360241, 1741464607]
    """
    words = np.random.RandomState(seed)
    size = _LARGEST_SEED + 1
    while True:
        product = int(words.randint(0, 2**32, dtype=np.uint32)) * size
        if product % 2**32 >= 2**32 % size:  # else some seeds would come more often than others
            yield product >> 32
