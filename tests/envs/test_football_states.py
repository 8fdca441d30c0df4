"""Saved games of football: they go on bit for bit, and those of another kind are refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from football_installed import need
from football_play import play

from torchrl_hts.env_state import restore_environment, save_environment
from torchrl_hts.envs import make_football
from torchrl_hts.errors import CannotSaveError


@pytest.mark.parametrize(
    ("scenario", "steps"),
    [("academy_empty_goal_close", 3), ("academy_pass_and_shoot_with_keeper", 200)],
)
def test_a_restored_game_goes_on_bit_for_bit(scenario: str, steps: int) -> None:
    need("gfootball")
    first, second = (make_football(scenario, engine="gfootball") for _ in range(2))
    first.reset(seed=5)
    play(first, steps, np.random.default_rng(0))
    state = save_environment(first)
    goes_on = play(first, 70, np.random.default_rng(1))
    second.reset(seed=6)  # what it was at before doesn't matter
    play(second, 2, np.random.default_rng(2))
    restore_environment(second, state)
    assert play(second, 70, np.random.default_rng(1)) == goes_on
    assert any(len(step) == 2 for step in goes_on)  # into the next episode
    third = make_football(scenario, engine="gfootball")  # never reset
    restore_environment(third, state)
    again = play(third, 9, np.random.default_rng(1))
    assert again == goes_on[: len(again)]
    for env in (first, second, third):
        env.close()


def test_a_game_of_another_kind_is_not_restored() -> None:
    """Gfootball itself would end the process."""
    need("gfootball")
    env: Any = make_football("academy_empty_goal", engine="gfootball")
    with pytest.raises(CannotSaveError, match="has not begun"):
        env.get_state()
    env.reset(seed=0)
    state = save_environment(env)
    other: dict[str, dict[str, Any]] = {
        "academy_empty_goal_close, 1 controlled": {},
        "academy_empty_goal, 2 controlled": {"number_of_left_players_agent_controls": 2},
        "1 controlled, simple115v2": {"representation": "simple115v2"},
        "stacked=False": {"stacked": False},
    }
    for expected, options in other.items():
        scenario = "academy_empty_goal" if options else "academy_empty_goal_close"
        another = make_football(scenario, engine="gfootball", **options)
        said = f"one of academy_empty_goal, 1 .*expected .*{expected}"
        with pytest.raises(ValueError, match=said):
            restore_environment(another, state)
        another.close()
    env.close()


def test_envpools_games_cannot_be_saved() -> None:
    need("envpool")
    env = make_football(engine="envpool")
    env.reset(seed=0)
    with pytest.raises(CannotSaveError, match=r"EnvPool can't save.*engine='gfootball'"):
        save_environment(env)
    env.close()


def test_a_forged_state_runs_no_code(tmp_path: Path) -> None:
    """The package unpickles a part of its state."""
    need("gfootball")

    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    env, other = (make_football(engine="gfootball") for _ in range(2))
    env.reset(seed=1)
    base: Any = env.unwrapped
    kind, playing, of_engine, *others = base.get_state()
    *numbers, state = of_engine
    size = int.from_bytes(state[:4], "little")
    harm = pickle.dumps(Harmful())
    forged = len(harm).to_bytes(4, "little") + harm + state[4 + size :]
    other.reset(seed=2)
    with pytest.raises(pickle.UnpicklingError, match=r"it names posix\.mkdir"):
        other.unwrapped.set_state((kind, playing, (*numbers, forged), *others))
    assert not (tmp_path / "made").exists()
    other.unwrapped.set_state((kind, playing, of_engine, *others))
    env.close(), other.close()
