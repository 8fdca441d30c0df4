"""Games of ALE: what is restored goes on bit for bit, or is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
from resumption import check_resumption, play

from torchrl_hts.env_state import CannotSaveError, restore_environment, save_environment
from torchrl_hts.envs import make_atari

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


@pytest.mark.parametrize(
    ("game", "options", "steps"),
    [
        ("Pong", {}, 50),
        ("Pong", {"sticky_actions": True}, 50),
        ("Breakout", {"terminal_on_life_loss": True, "sticky_actions": True}, 120),
        ("Breakout", {"terminal_on_life_loss": True, "frame_skip": 1}, 300),
        ("Seaquest", {"terminal_on_life_loss": True, "sticky_actions": True}, 50),
        ("MontezumaRevenge", {"terminal_on_life_loss": True, "sticky_actions": True}, 50),
        ("Qbert", {"noop_max": 0}, 50),  # its first frames are cut off
    ],
    ids=str,
)
def test_atari(game: str, options: dict[str, Any], steps: int) -> None:
    make = partial(make_atari, f"ALE/{game}-v5", **options)
    check_resumption(make, steps, saves=4, ends=game == "Breakout")


@pytest.mark.parametrize(
    "options",
    [
        {"id": "ALE/Pong-v5", "max_num_frames_per_episode": 150},  # sticky, four frames a step
        {"id": "ALE/Breakout-v5", "frameskip": (2, 5), "mode": 4, "difficulty": 1},
        {"id": "ALE/Freeway-v5", "obs_type": "ram", "repeat_action_probability": 0.5},
        {"id": "ALE/Pong-v5", "continuous": True, "repeat_action_probability": 0.0},
    ],
    ids=str,
)
def test_the_emulators_settings(options: dict[str, Any]) -> None:
    import ale_py

    gym.register_envs(ale_py)
    make = partial(gym.make, **options)
    check_resumption(make, 50, saves=5, ends="max_num_frames_per_episode" in options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"sound_obs": True}, "sound"), ({"continuous": True}, "continuous actions that are sticky")],
)
def test_what_the_emulator_does_not_tell_is_refused(options: dict[str, Any], reason: str) -> None:
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", **options)
    env.reset(seed=0)
    with pytest.raises(CannotSaveError, match=f"AtariEnv: .*{reason}"):
        save_environment(env)


def test_a_game_that_the_emulator_saves_wrongly_is_refused() -> None:
    """Miniature Golf writes its score as booleans, and reads numbers."""
    env = make_atari("ALE/MiniatureGolf-v5", noop_max=0)
    env.reset(seed=0)
    before = play(env, [0, 1])
    with pytest.raises(CannotSaveError, match=r"AtariEnv: the coming frames depend on more"):
        save_environment(env)
    again = make_atari("ALE/MiniatureGolf-v5", noop_max=0)
    again.reset(seed=0)
    events = [2, 1, 0, None, 3]
    assert play(again, [0, 1]) == before
    assert play(again, events) == play(env, events)


def test_a_state_of_another_game_or_with_other_settings() -> None:
    state = save_environment(make_atari())
    with pytest.raises(ValueError, match=r"pong\.bin.* Only this one has: .*breakout\.bin"):
        restore_environment(make_atari("ALE/Breakout-v5", fire_on_reset=True), state)
    with pytest.raises(ValueError, match=r"repeat_action_probability of 0\.25"):
        restore_environment(make_atari(sticky_actions=True), state)
