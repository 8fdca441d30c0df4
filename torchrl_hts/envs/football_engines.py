"""The two engines of Google Research Football behind one small interface.

Both play the same game: with the same engine seed, number of the episode and actions they show the
same, bit for bit. What differs is what they tell of it, and that only gfootball's state can be
saved. Neither is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from torchrl_hts.env_state.names import Names
from torchrl_hts.env_state.pickles import StateReader
from torchrl_hts.envs.football_pool import Pool, PoolProcess, SharedGame, SharedPool
from torchrl_hts.envs.football_rules import HEIGHT, WIDTH, Moment, draw_minimap, engine_seeds
from torchrl_hts.errors import CannotSaveError

__all__ = ["Engine", "EnvPoolEngine", "GFootballEngine"]

Array = np.ndarray[Any, Any]

_REACH = 2  # cells between the ball and a player that has it


class Engine(Protocol):
    """A game of football.

    Attributes:
        episode_number: of the present episode; the first after `seed` is number 2, since EnvPool
            plays one that nobody sees. It decides who kicks off in a match.
        engine_seed: of the present episode.
    """

    episode_number: int
    engine_seed: int

    def begin_reset(self, seed: int) -> None:
        """Say which seed comes next, so that games of one process can share what plays them."""

    def seed(self, seed: int) -> None:
        """Determine all episodes to come."""

    def reset(self) -> Moment:
        """Begin the next episode."""

    def begin_step(self, actions: Sequence[int]) -> bool:
        """Begin the step that comes next, in the background; returns False if it can't."""

    def step(self, actions: Sequence[int]) -> Moment:
        """A tenth of a second of the game."""

    def minimap(self) -> Array:
        """The present moment, uint8 ``[players, 4, 72, 96]``."""

    def features(self) -> Array:
        """The present moment as simple115v2, float32 ``[players, 115]``."""

    def get_state(self) -> tuple[Any, ...]:
        """All that the future depends on."""

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Go on where `get_state` was called, in another process maybe."""

    def close(self) -> None:
        """Let go of the game."""


def _check_pickle(state: bytes) -> None:
    """Raise if a state of gfootball's, which unpickles a part of it, names what it shouldn't.

    That part comes first: its size in four bytes, then a pickle of plain data and an ``EnvState``.
    """
    from gfootball.env.football_env_core import EnvState

    size = int.from_bytes(state[:4], "little")
    StateReader(io.BytesIO(state[4 : 4 + size]), Names([EnvState]), {}).load()


class GFootballEngine:
    """The game of the gfootball package.

    Args:
        scenario: its name.
        num_players: how many players of the left team are controlled.

    Raises:
        ModuleNotFoundError: gfootball, or a package that it needs, is not installed.
        ValueError: the scenario has fewer players to control.
    """

    def __init__(self, scenario: str, num_players: int) -> None:
        # The second because gfootball prints, and goes on, where its engine was not built.
        for name in ("cv2", "gfootball_engine", "gfootball.env.wrappers"):
            _import(
                name, "run 'make football', or take the engine 'envpool' (docs/results/football.md)"
            )
        from gfootball.env.config import Config

        self._values = {
            "level": scenario,
            "players": [f"agent:left_players={num_players}"],
            # Else gfootball draws one from Python's global generator.
            "game_engine_random_seed": 0,
            "reverse_team_processing": False,
        }
        available = Config(dict(self._values)).ScenarioConfig().controllable_left_players
        if not 1 <= num_players <= available:
            raise ValueError(
                f"{scenario} has {available} players to control, and "
                f"number_of_left_players_agent_controls is {num_players}: give 1 to {available}"
            )
        self._game: Any = None  # made when it is needed: it takes 100 MB
        self._observations: list[dict[str, Any]] = []
        self.engine_seed = 0
        self.episode_number = 1

    def begin_reset(self, seed: int) -> None:
        """Nothing: each game plays for itself."""

    def seed(self, seed: int) -> None:
        """Determine all episodes to come."""
        self._seed, self._seeds = seed, engine_seeds(seed)
        self.engine_seed = next(self._seeds)
        self.episode_number = 1

    def _started(self) -> Any:
        if self._game is None:
            from gfootball.env.config import Config
            from gfootball.env.football_env import FootballEnv

            self._game = FootballEnv(Config(dict(self._values)))
        return self._game

    def reset(self) -> Moment:
        """Begin the next episode."""
        game = self._started()
        self.engine_seed = next(self._seeds)
        game._config.update(
            {
                "game_engine_random_seed": self.engine_seed,
                "reverse_team_processing": bool(self.engine_seed % 2),
                "episode_number": self.episode_number,  # which reset adds one to
            }
        )
        self.episode_number += 1
        self._observations = game.reset()
        return self._moment()

    def begin_step(self, actions: Sequence[int]) -> bool:
        """Can't: the game runs in the caller's thread."""
        return False

    def step(self, actions: Sequence[int]) -> Moment:
        """A tenth of a second of the game."""
        self._observations = self._game.step(list(actions))[0]
        return self._moment()

    def _moment(self) -> Moment:
        seen = self._observations[0]
        return Moment(
            score=(int(seen["score"][0]), int(seen["score"][1])),
            game_mode=int(seen["game_mode"]),
            ball_owned_team=int(seen["ball_owned_team"]),
            steps_left=int(seen["steps_left"]),
            ball=(seen["ball"][0], seen["ball"][1]),
            has_ball=tuple(
                seen["ball_owned_team"] == 0 and seen["ball_owned_player"] == player["active"]
                for player in self._observations
            ),
        )

    def minimap(self) -> Array:
        """The present moment, uint8 ``[players, 4, 72, 96]``."""
        return np.stack(
            [
                draw_minimap(seen["left_team"], seen["right_team"], seen["ball"], seen["active"])
                for seen in self._observations
            ]
        )

    def features(self) -> Array:
        """The present moment as simple115v2, float32 ``[players, 115]``."""
        from gfootball.env.wrappers import Simple115StateWrapper

        converted: Array = Simple115StateWrapper.convert_observation(self._observations, True)
        return converted

    def get_state(self) -> tuple[Any, ...]:
        """All that the future depends on."""
        return self._seed, self.episode_number, self._game.get_state({})

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Go on where `get_state` was called, in another process maybe."""
        seed, episode_number, of_game = state
        self.seed(seed)
        # An episode of the same engine seed, into which the rest is put.
        self.episode_number = episode_number - 1
        self._seeds = islice(engine_seeds(seed), episode_number - 1, None)
        self.reset()
        _check_pickle(of_game)
        self._game.set_state(of_game)
        self._observations = self._game.observation()

    def close(self) -> None:
        """Let go of the game."""
        if self._game is not None:
            self._game.close()
            self._game = None


def _import(name: str, remedy: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"this engine of football needs {error.name or name!r}, which can't be imported "
            f"({error}): {remedy}",
            name=error.name,
        ) from error


def _position(plane: Array) -> tuple[Any, Any]:
    """Field coordinates of the middle of the one cell that is marked."""
    row, column = divmod(int(plane.argmax()), WIDTH)
    return (
        np.float64((column + 0.5) / WIDTH * 2 - 1),
        np.float64(((row + 0.5) / HEIGHT * 2 - 1) / 2.25),
    )


def _are_close(ball: tuple[Any, Any], player: tuple[Any, Any]) -> bool:
    """Whether a player that nobody else is nearer than may have the ball."""
    columns = abs(ball[0] - player[0]) / 2 * WIDTH
    rows = abs(ball[1] - player[1]) * 2.25 / 2 * HEIGHT
    return bool(round(max(columns, rows)) <= _REACH)


class EnvPoolEngine:
    """The game of the envpool package, in a pool of its own or one that games of a process share.

    It tells less than gfootball: of the ball only the cell of the minimap, and nothing of which
    player is the controlled one but its cell. See docs/results/football.md for what follows.

    EnvPool draws the seeds of episodes from one that is given when a pool is made, and never gives
    back the memory of a game (45 MB). So the first pool lives in this process, shared by the games
    whose seeds were announced with `begin_reset`. Each that a new seed asks for later lives in a
    process of its own, which ends with it.

    Args:
        scenario: its name.

    Raises:
        ModuleNotFoundError: envpool is not installed.
    """

    def __init__(self, scenario: str) -> None:
        _import("envpool", "with Python 3.11 or newer, pip install 'torchrl_hts[envpool]'")
        self._scenario = scenario
        self._pool: Pool | PoolProcess | SharedGame | None = None
        self._expected: SharedGame | None = None  # for the seed that was announced
        self._minimap = np.zeros((4, HEIGHT, WIDTH), np.uint8)
        self.engine_seed = 0
        self.episode_number = 1

    def begin_reset(self, seed: int) -> None:
        """Join the pool of those games of this process that have not begun yet."""
        if self._pool is None:
            self._expected = SharedPool.join(self._scenario, seed)

    def seed(self, seed: int) -> None:
        """Determine all episodes to come."""
        expected, self._expected = self._expected, None
        if expected is not None and expected.seed == seed:
            self._pool = expected
            return
        make = Pool if self._pool is None else PoolProcess
        if self._pool is not None:
            self._pool.close()
        self._pool = make(self._scenario, seed)

    def reset(self) -> Moment:
        """Begin the next episode."""
        assert self._pool is not None
        return self._moment(*self._pool.reset())

    def begin_step(self, actions: Sequence[int]) -> bool:
        """Begin the step that comes next, if the game is one of a shared pool."""
        return isinstance(self._pool, SharedGame) and self._pool.begin_step(actions[0])

    def step(self, actions: Sequence[int]) -> Moment:
        """A tenth of a second of the game."""
        assert self._pool is not None
        return self._moment(*self._pool.step(actions[0]))

    def _moment(self, minimap: Array, info: dict[str, Any]) -> Moment:
        self._minimap = minimap
        self.engine_seed = info["engine_seed"]
        self.episode_number = info["episode_number"]
        ball, player = (_position(plane) for plane in minimap[2:])
        return Moment(
            score=tuple(info["score"]),
            game_mode=info["game_mode"],
            ball_owned_team=info["ball_owned_team"],
            steps_left=info["steps_left"],
            ball=ball,
            has_ball=(info["ball_owned_team"] == 0 and _are_close(ball, player),),
        )

    def minimap(self) -> Array:
        """The present moment, uint8 ``[1, 4, 72, 96]``."""
        return self._minimap[None]

    def features(self) -> Array:
        """EnvPool doesn't tell what simple115v2 holds."""
        raise NotImplementedError("EnvPool shows minimaps only")

    def get_state(self) -> tuple[Any, ...]:
        """EnvPool has no means to save a game.

        Raises:
            CannotSaveError: always.
        """
        raise CannotSaveError(
            "EnvPool can't save the state of a football game. Take engine='gfootball' for a run "
            "that goes on exactly where it was stopped"
        )

    def set_state(self, state: tuple[Any, ...]) -> None:
        """There is none; see `get_state`."""
        self.get_state()

    def close(self) -> None:
        """Let go of the game."""
        if self._pool is not None:
            self._pool.close()
