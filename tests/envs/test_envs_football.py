"""make_football: what it yields on each engine, its rewards, ends, seeds and saved states."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from football_installed import ENGINES, need
from gymnasium.utils.env_checker import check_env

from torchrl_hts.env_state import restore_environment, save_environment
from torchrl_hts.envs import make_football
from torchrl_hts.envs.football_rules import SCENARIOS, Moment, Referee, engine_seeds
from torchrl_hts.errors import CannotSaveError

DRILL = SCENARIOS["academy_empty_goal_close"]
MATCH = SCENARIOS["11_vs_11_stochastic"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that is installed."""
    need(request.param)
    return str(request.param)


def play(env: gym.Env[Any, Any], steps: int, actions: Any) -> list[Any]:
    """Steps with random actions, on over the ends of episodes; all that the environment gives."""
    trace: list[Any] = []
    for _ in range(steps):
        action = actions.integers(19, size=env.action_space.shape)
        observation, reward, terminated, truncated, info = env.step(action)
        trace.append((observation.tobytes(), reward, terminated, truncated, str(info)))
        if terminated or truncated:
            observation, info = env.reset()
            trace.append((observation.tobytes(), str(info)))
    return trace


def run_towards_goal(env: gym.Env[Any, Any]) -> list[tuple[float, dict[str, Any]]]:
    """Runs, then shoots: scores in most games in front of an empty goal."""
    steps = []
    for step in range(400):
        _, reward, terminated, truncated, info = env.step(5 if step < 8 else 12)
        steps.append((reward, info))
        if terminated or truncated:
            return steps
    raise AssertionError("no end in 400 steps")


# What an environment is.


def test_gymnasiums_checker_has_nothing_to_say(engine: str) -> None:
    env = make_football(engine=engine, render_mode="rgb_array")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # It makes environments of other render modes by their id, which this one has not.
        warnings.filterwarnings("ignore", message=".*Not able to test alternative render modes.*")
        check_env(env)
    env.close()


def test_torchrls_checker_has_nothing_to_say(engine: str) -> None:
    from torchrl.envs import GymWrapper
    from torchrl.envs.utils import check_env_specs

    env = GymWrapper(make_football(engine=engine))
    check_env_specs(env)
    env.close()


def test_observations_are_stacked_minimaps_with_the_newest_last(engine: str) -> None:
    env = make_football(engine=engine)
    assert env.observation_space == gym.spaces.Box(0, 255, (16, 72, 96), np.uint8)
    before, _ = env.reset(seed=0)
    assert np.array_equal(before[:4], before[12:])
    after = env.step(5)[0]
    assert np.array_equal(after[:12], before[4:])
    ball, player = after[14], after[15]
    assert ball.sum() == player.sum() == 255
    assert (player <= after[12]).all()  # the controlled player is of the left team
    assert (after[12] > 0).sum() == 2  # with its keeper
    env.close()


def test_a_picture_of_the_field(engine: str) -> None:
    env = make_football(engine=engine, render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.shape == (576, 768, 3)
    assert picture.dtype == np.uint8
    assert (picture == 255).all(-1).sum() == 64  # the ball, one cell of 8 x 8
    env.close()


# Seeds.


def test_a_seed_determines_all_and_each_episode_has_its_own(engine: str) -> None:
    env = make_football(engine=engine)
    games = []
    for seed in (3, 4, 3):
        first, info = env.reset(seed=seed)
        seeds = [info["engine_seed"]]
        trace = play(env, 5, np.random.default_rng(0))
        seeds += [env.reset()[1]["engine_seed"] for _ in range(2)]
        assert len(set(seeds)) == 3
        games.append((first.tobytes(), trace, seeds))
    env.close()
    assert games[0] == games[2]
    assert not set(games[0][2]) & set(games[1][2])


def test_both_engines_play_the_same_games() -> None:
    """Over several episodes, all but the rewards for checkpoints."""
    need(*ENGINES)
    traces = []
    for name in ENGINES:
        env = make_football("academy_3_vs_1_with_keeper", engine=name, rewards="scoring")
        observation, info = env.reset(seed=7)
        trace = [observation.tobytes(), info["engine_seed"], info["episode_number"]]
        actions = np.random.default_rng(7)
        for _ in range(150):
            observation, *rest, info = env.step(actions.integers(19))
            trace.append((observation.tobytes(), rest, info["score"], info["steps_left"]))
            if any(rest[1:]):
                observation, info = env.reset()
                trace += [observation.tobytes(), info["engine_seed"], info["episode_number"]]
        env.close()
        traces.append(trace)
    assert traces[0] == traces[1]
    assert traces[0][1:3] != traces[0][-2:]


def test_a_scenario_of_which_the_episodes_number_decides_the_kick_off() -> None:
    need(*ENGINES)
    first = []
    for name in ENGINES:
        env = make_football("5_vs_5", engine=name)
        first.append([env.reset(seed=1)[0].tobytes(), env.reset()[0].tobytes()])
        env.close()
    assert first[0] == first[1]


def test_engine_seeds_are_envpools() -> None:
    need("envpool")
    env = make_football(engine="envpool")
    for seed in (0, 2**31 - 1):
        env._engine.seed(seed)
        drawn = []
        for _ in range(3):
            env._engine.reset()
            drawn.append(env._engine.engine_seed)
        seeds = engine_seeds(seed)
        assert drawn == [next(seeds) for _ in range(4)][1:]
    env.close()


# Rewards and ends.


def test_goals_and_checkpoints_come_apart_in_info(engine: str) -> None:
    both, alone = (
        make_football(engine=engine, rewards=rewards)
        for rewards in ("scoring,checkpoints", "scoring")
    )
    scored = 0
    for seed in range(3):
        both.reset(seed=seed)
        alone.reset(seed=seed)
        for (reward, info), (score, _) in zip(
            run_towards_goal(both), run_towards_goal(alone), strict=True
        ):
            assert score == info["score_reward"]
            assert reward == pytest.approx(score + info["checkpoint_reward"])
        if info["score"] == (1, 0):
            scored += 1
            assert score == 1
    both.close()
    alone.close()
    assert scored


@pytest.mark.parametrize("scenario", ["academy_run_to_score_with_keeper", "academy_corner"])
def test_gfootball_gives_what_its_own_wrappers_give(scenario: str) -> None:
    """Observations, rewards and ends of `create_environment`, bit for bit."""
    need("gfootball")
    from gfootball.env import create_environment

    stock = create_environment(
        scenario,
        stacked=True,
        rewards="scoring,checkpoints",
        other_config_options={"game_engine_random_seed": 0},
    )
    config = stock.unwrapped._config
    own = make_football(scenario, engine="gfootball")
    actions = np.random.default_rng(0)
    for episode in range(3):
        observation, info = own.reset(seed=0) if episode == 0 else own.reset()
        config["game_engine_random_seed"] = info["engine_seed"]
        config["reverse_team_processing"] = bool(info["engine_seed"] % 2)
        config["episode_number"] = info["episode_number"] - 1
        assert np.array_equal(observation, stock.reset().transpose(2, 0, 1))
        done = False
        for step in range(60):
            action = 5 if step < 12 else int(actions.integers(19))
            observation, reward, terminated, truncated, _ = own.step(action)
            expected, stock_reward, done, _ = stock.step(action)
            assert np.array_equal(observation, expected.transpose(2, 0, 1))
            assert np.float32(reward) == stock_reward
            assert done == (terminated or truncated)
            if done:
                break
    stock.close()
    own.close()


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


# More than one player, and features.


def test_several_players_act_and_see_each_for_itself() -> None:
    need("gfootball")
    env = make_football("academy_3_vs_1_with_keeper", number_of_left_players_agent_controls=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    assert env.action_space == gym.spaces.MultiDiscrete([19] * 3)
    observation, _ = env.reset(seed=0)
    assert observation.shape == (3, 16, 72, 96)
    assert np.array_equal(observation[0, :3], observation[1, :3])
    assert len({agent[3].tobytes() for agent in observation}) == 3  # each controls another player
    _, reward, _, _, info = env.step(np.array([5, 0, 12]))
    assert reward == pytest.approx(info["player_rewards"].mean())
    env.close()


def test_features_instead_of_minimaps() -> None:
    need("gfootball")
    env = make_football(representation="simple115v2", stacked=False, render_mode="rgb_array")
    check_env(env, skip_render_check=True)
    observation, _ = env.reset(seed=0)
    assert observation.shape == (115,)
    assert observation[88:90] == pytest.approx([0.77, 0.0], abs=0.01)  # where the ball lies
    assert env.render().shape == (576, 768, 3)
    env.close()


# Saved states.


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


# What is not there.


def test_no_torch_and_no_engine_is_imported(engine: str) -> None:
    code = (
        "import sys\n"
        "from torchrl_hts.envs import make_football\n"
        "assert not {'gfootball', 'envpool', 'gym'} & set(sys.modules)\n"
        f"make_football(engine={engine!r}).reset(seed=0)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("gfootball", "gfootball_engine", "make football"),
        ("envpool", "envpool", r"pip install 'torchrl_hts\[envpool\]'"),
    ],
)
def test_a_missing_engine_is_named(
    name: Any, module: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=rf"{module}.*{remedy}"):
        make_football(engine=name)


def test_an_episode_that_is_not_being_played_has_no_step(engine: str) -> None:
    """EnvPool would play on, and count the goal of the episode before against us."""
    env = make_football(engine=engine, render_mode="rgb_array").unwrapped
    for call in (lambda: env.step(0), env.render):
        with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\)"):
            call()
    for seed in range(2):
        env.reset(seed=seed)
        run_towards_goal(env)
        with pytest.raises(gym.error.ResetNeeded):
            env.step(0)
    env.reset()
    for action in (19, -1, 1.5):
        with pytest.raises(gym.error.InvalidAction, match=r"expected one of Discrete\(19\)"):
            env.step(action)
    env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenario": "academy_goal"}, "scenario is 'academy_goal'; expected one of 'academy_emp"),
        ({"engine": "unity"}, "engine is 'unity'; expected one of 'gfootball', 'envpool'"),
        ({"representation": "raw"}, "representation is 'raw'"),
        ({"rewards": "checkpoints"}, "rewards is 'checkpoints'"),
        ({"render_mode": "human"}, "render_mode is 'human'"),
        ({"stacked": "yes"}, "stacked is 'yes'; expected one of True, False"),
        ({"engine": "envpool", "representation": "simple115v2"}, "take engine='gfootball'"),
        (
            {"engine": "envpool", "number_of_left_players_agent_controls": 2},
            "take engine='gfootball'",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_football(**options)


def test_more_players_than_a_scenario_has_are_refused() -> None:
    with pytest.raises(TypeError, match=r"controls must be an int, got 2\.5"):
        make_football(number_of_left_players_agent_controls=2.5)  # type: ignore[arg-type]
    need("gfootball")
    with pytest.raises(ValueError, match="academy_empty_goal_close has 2 players to control"):
        make_football(number_of_left_players_agent_controls=5)
