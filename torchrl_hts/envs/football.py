"""Google Research Football as a gymnasium environment, on gfootball or on EnvPool.

Source: K. Kurach et al., *Google Research Football: A Novel Reinforcement Learning Environment*
(AAAI 2020, arXiv 1907.11180). Nothing here imports torch, and neither engine is imported before
`make_football` is called.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts.envs.football_engines import Engine, EnvPoolEngine, GFootballEngine
from torchrl_hts.envs.football_rules import (
    HEIGHT,
    SCENARIOS,
    WIDTH,
    Moment,
    Referee,
    Verdict,
    paint,
)
from torchrl_hts.errors import CannotSaveError
from torchrl_hts.errors.checks import check_integer

__all__ = ["FootballEnv", "check_football", "make_football"]

Array = np.ndarray[Any, Any]
Info = dict[str, Any]

_NUM_ACTIONS = 19
_NUM_FEATURES = 115
_STACK = 4


class FootballEnv(BackgroundEnv):
    """One game of football; see `make_football`, which makes it.

    Args:
        scenario: name of the scenario.
        engine: plays it.
        representation: ``"extracted"`` or ``"simple115v2"``.
        checkpoints: whether rewards hold those for checkpoints.
        stacked: whether observations hold the last four moments.
        num_players: how many players are controlled.
        render_mode: ``"rgb_array"`` or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  as gymnasium has it

    def __init__(
        self,
        scenario: str,
        engine: Engine,
        *,
        representation: str,
        checkpoints: bool,
        stacked: bool,
        num_players: int,
        render_mode: str | None,
    ) -> None:
        self.render_mode = render_mode
        self.scenario = scenario
        self._engine = engine
        self._extracted = representation == "extracted"
        self._checkpoints = checkpoints
        self._num_players = num_players
        self._frames: deque[Array] = deque(maxlen=_STACK if stacked else 1)
        self._referee = Referee(SCENARIOS[scenario], num_players)
        self._is_seeded = False
        self._is_playing = False
        # What a saved game has to agree on: the engine ends the process over one of another kind.
        self._kind = f"{scenario}, {num_players} controlled, {representation}, stacked={stacked}"

        depth = self._frames.maxlen or 1
        one: tuple[int, ...] = (4 * depth, HEIGHT, WIDTH)
        if not self._extracted:
            one = (_NUM_FEATURES * depth,)
        shape = one if num_players == 1 else (num_players, *one)
        self.observation_space = (
            gym.spaces.Box(0, 255, shape, np.uint8)
            if self._extracted
            else gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
        )
        self.action_space = (
            gym.spaces.Discrete(_NUM_ACTIONS)
            if num_players == 1
            else gym.spaces.MultiDiscrete([_NUM_ACTIONS] * num_players)
        )

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        """Begins an episode: the first of those that a seed determines, or the next one.

        Args:
            seed: begins a new sequence of episodes.
            options: not used.
        """
        super().reset(seed=seed)
        if seed is not None or not self._is_seeded:
            self._engine.seed(_engines_seed(self.np_random))
            self._is_seeded = True
        moment = self._engine.reset()
        self._referee = Referee(SCENARIOS[self.scenario], self._num_players)
        self._frames.clear()
        for _ in range(self._frames.maxlen or 1):
            self._frames.append(self._frame())
        self._is_playing = True
        return self._observation(), self._info(moment)

    def begin_reset(self, seed: int | None) -> bool:
        """See `BackgroundEnv`."""
        self._engine.begin_reset(_engines_seed(gym.utils.seeding.np_random(seed)[0]))
        return False

    def begin_step(self, action: Any) -> bool:
        """See `BackgroundEnv`."""
        return self._engine.begin_step(self._each_players(action))

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        """A tenth of a second of the game.

        Args:
            action: one of the 19 of gfootball's default set, or one for each controlled player.

        Raises:
            gymnasium.error.ResetNeeded: the episode is over, or none has begun.
            gymnasium.error.InvalidAction: the action is not in `action_space`.
        """
        moment = self._engine.step(self._each_players(action))
        verdict = self._referee.judge(moment)
        self._is_playing = not (verdict.terminated or verdict.truncated)
        self._frames.append(self._frame())
        reward = float(verdict.rewards.mean() if self._checkpoints else verdict.score_reward)
        return (
            self._observation(),
            reward,
            verdict.terminated,
            verdict.truncated,
            self._info(moment, verdict),
        )

    def _each_players(self, action: Any) -> list[int]:
        if not self._is_playing:
            raise gym.error.ResetNeeded("no episode is being played: call reset() before step()")
        if not self.action_space.contains(action):
            raise gym.error.InvalidAction(
                f"the action is {action!r}; expected one of {self.action_space}"
            )
        return [int(each) for each in np.atleast_1d(action)]

    def _frame(self) -> Array:
        return self._engine.minimap() if self._extracted else self._engine.features()

    def _observation(self) -> Array:
        stacked = np.concatenate(self._frames, axis=1)
        return stacked if self._num_players > 1 else stacked[0]

    def _info(self, moment: Moment, verdict: Verdict | None = None) -> Info:
        rewards = np.zeros(self._num_players, np.float32) if verdict is None else verdict.rewards
        score_reward = 0 if verdict is None else verdict.score_reward
        info: Info = {
            "score": moment.score,
            "score_reward": score_reward,
            "checkpoint_reward": float(rewards.mean() - score_reward),
            "steps_left": moment.steps_left,
            "engine_seed": self._engine.engine_seed,
            "episode_number": self._engine.episode_number,
        }
        if self._num_players > 1:
            info["player_rewards"] = (
                rewards if self._checkpoints else np.full_like(rewards, score_reward)
            )
        return info

    def render(self) -> Array | None:
        """The field from above, uint8 ``[576, 768, 3]``; None without a render mode."""
        if self.render_mode is None:
            return None
        if not self._is_seeded:
            raise gym.error.ResetNeeded("the game has not begun: call reset() before render()")
        return paint(self._engine.minimap()[0])

    def get_state(self) -> tuple[Any, ...]:
        """All that the future depends on beside the generator; see `torchrl_hts.env_state`.

        Raises:
            CannotSaveError: with EnvPool, which can't save a game, and before the first reset.
        """
        if not self._is_seeded:
            raise CannotSaveError("the game has not begun: call reset() before it is saved")
        of_game = self._engine.get_state(), self._referee.get_state(), list(self._frames)
        return self._kind, self._is_playing, *of_game

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Go on where `get_state` was called, in another process maybe.

        Args:
            state: what `get_state` returned.

        Raises:
            ValueError: the state is of another scenario, or of other arguments.
        """
        kind, *of_game = state
        if kind != self._kind:
            raise ValueError(f"the saved game is one of {kind!s:.100}; expected {self._kind}")
        self._is_playing, of_engine, of_referee, frames = of_game
        self._engine.set_state(of_engine)
        self._referee.set_state(of_referee)
        self._frames.clear()
        self._frames.extend(frames)
        self._is_seeded = True

    def close(self) -> None:
        """Ends the game."""
        self._engine.close()


def _engines_seed(generator: np.random.Generator) -> int:
    return int(generator.integers(2**31))


def make_football(
    scenario: str = "academy_empty_goal_close",
    *,
    engine: Literal["gfootball", "envpool"] = "gfootball",
    representation: Literal["extracted", "simple115v2"] = "extracted",
    rewards: Literal["scoring", "scoring,checkpoints"] = "scoring,checkpoints",
    stacked: bool = True,
    number_of_left_players_agent_controls: int = 1,
    render_mode: str | None = None,
) -> gym.Env[Array, Any]:
    """Builds an environment of Google Research Football; never imports torch.

    Observations are gfootball's, with the planes first as ``Conv2d`` takes them: ``"extracted"``
    is uint8 ``[16, 72, 96]`` (``[4, 72, 96]`` if not stacked), four planes for each moment (own
    team, other team, ball, controlled player), the newest moment last. ``"simple115v2"`` is float32
    ``[460]`` (``[115]``). With several controlled players they are ``[players, ...]``.

    Actions are the 19 of gfootball's default set, ``Discrete``, or ``MultiDiscrete`` with several
    players. The reward is then the mean of theirs, which `info` has one by one as
    ``"player_rewards"``.

    An episode is ``terminated`` by the rules of its scenario (a goal, the ball out of play or
    lost). It is ``truncated`` when its time is over: 401 steps in the drills, 3,001 in matches.
    ``info`` holds ``"score"`` (goals of both teams), ``"score_reward"`` and ``"checkpoint_reward"``
    of the step, ``"steps_left"``, ``"engine_seed"`` and ``"episode_number"``.

    ``reset(seed=...)`` determines all that follows; each episode gets an engine seed of its own.
    Both engines play the same games for the same seeds and actions, and show the same. Checkpoint
    rewards are gfootball's own, but those of ``"envpool"`` can come some steps early or late (see
    docs/results/football.md).

    Args:
        scenario: one of gfootball's, such as ``"academy_3_vs_1_with_keeper"``.
        engine: ``"gfootball"`` (``make football`` builds it; its games can be saved and gone on
            with exactly) or ``"envpool"`` (``pip install 'torchrl_hts[envpool]'``).
        representation: what observations are; EnvPool has ``"extracted"`` alone.
        rewards: with ``"checkpoints"``, ten times 0.1 for bringing the ball to the goal.
        stacked: observations hold the last four moments.
        number_of_left_players_agent_controls: how many players are controlled; EnvPool: one.
        render_mode: ``"rgb_array"``: pictures of the field from above, as the minimap shows it.

    Raises:
        ModuleNotFoundError: the engine is not installed.
        TypeError: the number of players is not an int.
        ValueError: there is no such scenario, or the engine can't do what is asked of it.

    >>> env = make_football("academy_empty_goal_close", engine="envpool")
    >>> observation, info = env.reset(seed=0)
    >>> observation.shape, observation.dtype, info["score"]
    ((16, 72, 96), dtype('uint8'), (0, 0))
    """
    check_football(scenario)
    _check("engine", engine, ["gfootball", "envpool"])
    _check("representation", representation, ["extracted", "simple115v2"])
    _check("rewards", rewards, ["scoring", "scoring,checkpoints"])
    _check("render_mode", render_mode, [None, "rgb_array"])
    _check("stacked", stacked, [True, False])
    num_players = check_integer(
        "number_of_left_players_agent_controls", number_of_left_players_agent_controls, least=0
    )
    game: Engine
    if engine == "gfootball":
        game = GFootballEngine(scenario, num_players)
    else:
        if representation != "extracted" or num_players != 1:
            raise ValueError(
                "EnvPool shows minimaps (representation='extracted') of one controlled player, and "
                f"representation={representation!r} with "
                f"number_of_left_players_agent_controls={num_players} was asked for: take "
                "engine='gfootball'"
            )
        game = EnvPoolEngine(scenario)
    return FootballEnv(
        scenario,
        game,
        representation=representation,
        checkpoints=rewards != "scoring",
        stacked=stacked,
        num_players=num_players,
        render_mode=render_mode,
    )


def check_football(scenario: str) -> None:
    """Find out whether there is such a scenario, without an engine.

    Args:
        scenario: such as ``"academy_3_vs_1_with_keeper"``.

    Raises:
        ValueError: there is no such scenario; the message names those that there are.
    """
    _check("scenario", scenario, list(SCENARIOS))


def _check(name: str, value: object, known: list[Any]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, known))}")
