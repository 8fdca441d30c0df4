"""make_atari: what it yields, its determinism, lives, and that it never imports torch."""

from __future__ import annotations

import builtins
import subprocess
import sys
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

from torchrl_hts.envs import EpisodicLife, FireOnReset, make_atari, make_atari_batch

Trace = list[tuple[bytes, float, bool, bool]]


def play(env: gym.Env[Any, Any], steps: int, seed: int) -> Trace:
    """Plays random actions from ``seed`` and records all that the environment returns."""
    actions = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    trace: Trace = [(observation.tobytes(), 0.0, False, False)]
    for _ in range(steps):
        action = int(actions.integers(env.action_space.n))  # type: ignore[attr-defined]
        observation, reward, terminated, truncated, _ = env.step(action)
        trace.append((observation.tobytes(), float(reward), terminated, truncated))
        if terminated or truncated:
            observation, _ = env.reset()
            trace.append((observation.tobytes(), 0.0, False, False))
    env.close()
    return trace


@pytest.mark.parametrize("options", [{}, {"terminal_on_life_loss": True, "sticky_actions": True}])
def test_gymnasiums_checker_has_nothing_to_say(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # It warns of every wrapped environment that it is wrapped.
        warnings.filterwarnings("ignore", message=".*different from the unwrapped version.*")
        check_env(make_atari("ALE/Breakout-v5", **options), skip_render_check=True)


def test_observations_are_stacked_grey_frames_with_the_newest_last() -> None:
    env = make_atari("ALE/Pong-v5")
    assert env.observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    before, _ = env.reset(seed=0)
    after, reward, terminated, truncated, _ = env.step(3)
    assert before.shape == after.shape == (4, 84, 84)
    assert before.dtype == after.dtype == np.uint8
    assert np.array_equal(after[:-1], before[1:])
    assert not np.array_equal(after[-1], before[-1])
    assert (reward, terminated, truncated) == (0.0, False, False)


@pytest.mark.parametrize("frame_skip", [1, 4])
def test_observations_are_those_of_gymnasiums_wrappers_over_the_screen(frame_skip: int) -> None:
    """The base environment observes the cheapest thing, which nobody is to see."""
    stock = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)  # RGB
    stock = FrameStackObservation(AtariPreprocessing(stock, frame_skip=frame_skip), 4)
    env = make_atari("ALE/Pong-v5", frame_skip=frame_skip, fire_on_reset=False)
    assert play(env, 300, seed=1) == play(stock, 300, seed=1)


def test_the_spec_makes_the_same_game() -> None:
    env = make_atari("ALE/Breakout-v5", terminal_on_life_loss=True)
    assert env.spec is not None
    assert play(gym.make(env.spec), 100, seed=1) == play(env, 100, seed=1)


def test_frame_stack_and_screen_size_are_the_callers() -> None:
    env = make_atari("ALE/Pong-v5", frame_stack=2, screen_size=42)
    assert env.observation_space.shape == (2, 42, 42)
    assert env.reset(seed=0)[0].shape == (2, 42, 42)


@pytest.mark.parametrize("sticky_actions", [False, True])
def test_same_seed_same_bits_and_another_seed_differs(sticky_actions: bool) -> None:
    def trace(seed: int) -> Trace:
        env = make_atari(
            "ALE/Breakout-v5", terminal_on_life_loss=True, sticky_actions=sticky_actions
        )
        return play(env, 300, seed)

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


def test_seeding_again_starts_the_same_episode_again() -> None:
    env = make_atari("ALE/Breakout-v5", terminal_on_life_loss=True)
    first, _ = env.reset(seed=5)
    for _ in range(40):
        env.step(2)
    again, _ = env.reset(seed=5)
    assert np.array_equal(first, again)


def test_rewards_are_the_games_own() -> None:
    """A hit in Space Invaders scores 5 points and more: not clipped."""
    rewards = {reward for _, reward, _, _ in play(make_atari("ALE/SpaceInvaders-v5"), 300, 0)}
    assert max(rewards) >= 5.0


def lives_at_each_end(env: gym.Env[Any, Any], episodes: int) -> list[int]:
    env.reset(seed=0)
    lives = []
    while len(lives) < episodes:
        _, _, terminated, truncated, info = env.step(0)  # never catches the ball
        if terminated or truncated:
            lives.append(info["lives"])
            env.reset()
    return lives


def test_a_lost_life_ends_the_episode_and_the_game_goes_on() -> None:
    env = make_atari("ALE/Breakout-v5", terminal_on_life_loss=True)
    # Breakout has five lives; after the last a new game starts.
    assert lives_at_each_end(env, 7) == [4, 3, 2, 1, 0, 4, 3]


def test_without_the_option_the_episode_is_the_whole_game() -> None:
    env = make_atari("ALE/Breakout-v5")
    env.reset(seed=0)
    for _ in range(200):
        _, _, terminated, _, info = env.step(1)
        assert terminated == (info["lives"] == 0)
        if terminated:
            break
    assert terminated


def test_a_seed_starts_a_new_game_in_the_middle_of_a_life() -> None:
    env = make_atari("ALE/Breakout-v5", terminal_on_life_loss=True)
    env.reset(seed=0)
    while True:
        _, _, terminated, _, info = env.step(0)
        if terminated:
            break
    assert info["lives"] == 4
    assert env.reset(seed=1)[1]["lives"] == 5


class ScriptedGame(gym.Env[np.ndarray[Any, Any], int]):
    """Records its actions, and ends when ``ends_at`` steps have been taken since the reset."""

    observation_space = gym.spaces.Box(0, 255, (1,), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, ends_at: list[int]) -> None:
        self.events: list[str] = []
        self._ends_at = ends_at
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self._step = 0
        self._end = self._ends_at.pop(0)
        self.events.append("reset" if seed is None else f"reset {seed}")
        return np.zeros(1, np.uint8), {"lives": 3}

    def step(self, action: int) -> tuple[Any, float, bool, bool, Any]:
        self._step += 1
        self.events.append(str(action))
        return np.zeros(1, np.uint8), 0.0, self._step >= self._end, False, {"lives": 3}


def test_fire_is_pressed_after_each_reset() -> None:
    game = ScriptedGame([9, 9])
    env = FireOnReset(game)
    env.reset(seed=7)
    env.reset()
    assert game.events == ["reset 7", "1", "2", "reset", "1", "2"]


def test_a_game_that_ends_while_it_is_started_is_reset_without_the_seed() -> None:
    game = ScriptedGame([2, 9])
    FireOnReset(game).reset(seed=7)
    assert game.events == ["reset 7", "1", "2", "reset"]


def test_a_game_that_ends_at_the_no_op_between_lives_starts_anew() -> None:
    game = ScriptedGame([1, 9])
    env = EpisodicLife(game)
    env.reset(seed=7)
    env.reset()
    assert game.events == ["reset 7", "0", "reset"]


@pytest.mark.parametrize(("fire_on_reset", "expected"), [(True, True), (False, False)])
def test_fire_is_an_option(fire_on_reset: bool, expected: bool) -> None:
    env: Any = make_atari("ALE/Breakout-v5", fire_on_reset=fire_on_reset)
    wrappers = []
    while isinstance(env, gym.Wrapper):
        wrappers.append(type(env))
        env = env.env
    assert (FireOnReset in wrappers) == expected


def test_torch_is_never_imported() -> None:
    code = (
        "import sys\n"
        "from torchrl_hts.envs import make_atari\n"
        "make_atari().reset(seed=0)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["ale_py", "cv2"])
def test_a_missing_extra_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_module(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_module)
    with pytest.raises(ModuleNotFoundError, match=rf"{module}.*torchrl_hts\[atari\]"):
        make_atari()


def test_an_unknown_game_is_named() -> None:
    with pytest.raises(gym.error.NameNotFound, match="Pogn"):
        make_atari("ALE/Pogn-v5")
    for env_id in ("Pong-v5", 3, None):
        with pytest.raises(ValueError, match="'ALE/'"):
            make_atari(env_id)  # type: ignore[arg-type]


class TestBatches:
    def test_spaces_and_rewards_are_those_of_single_games(self) -> None:
        options: dict[str, Any] = {"frame_stack": 2, "screen_size": 42}
        one = make_atari("ALE/Breakout-v5", **options)
        batch = make_atari_batch("ALE/Breakout-v5", 3, **options)
        assert batch.num_envs == 3
        assert batch.single_observation_space == one.observation_space
        assert batch.single_action_space == one.action_space
        batch.close()

    def test_frames_and_rewards_are_those_of_single_games(self) -> None:
        """From the same start on, as soon as there are frames for a whole stack."""
        options: dict[str, Any] = {"noop_max": 0, "fire_on_reset": False}
        one = make_atari("ALE/Breakout-v5", **options)
        batch = make_atari_batch("ALE/Breakout-v5", 2, **options)
        one.reset(seed=0)
        batch.reset(seed=0)
        rewarded = 0.0
        for step, action in enumerate(np.random.default_rng(0).integers(4, size=400).tolist()):
            frames, reward, terminated, _, _ = one.step(action)
            observations, rewards, terminations, _, _ = batch.step(np.full(2, action))
            assert (rewards[0], terminations[0]) == (reward, terminated)
            if terminated:
                break
            rewarded += float(reward)
            if step >= 2:
                assert np.array_equal(observations[0], frames)
        batch.close()
        assert terminated
        assert rewarded > 0

    def test_there_is_no_batch_of_a_game_that_there_is_not(self) -> None:
        with pytest.raises(gym.error.NameNotFound, match="Did you mean"):
            make_atari_batch("ALE/Pongg-v5", 2)


@pytest.mark.parametrize("name", ["num_envs", "frame_stack", "frame_skip", "screen_size"])
def test_a_batch_of_nothing_is_refused(name: str) -> None:
    """The emulators' code in C++ would end the process, or never return."""
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make_atari_batch(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"{name} must be an int, got 1.5"):
        make_atari_batch(**{name: 1.5})  # type: ignore[arg-type]
