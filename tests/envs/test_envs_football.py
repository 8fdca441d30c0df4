"""make_football: what it yields on each engine, its rewards and seeds."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from football_installed import ENGINES, need
from football_play import play
from gymnasium.utils.env_checker import check_env
from probe import football_engine, gfootball_config

from torchrl_hts.envs import make_football
from torchrl_hts.envs.football_rules import engine_seeds


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that is installed."""
    need(request.param)
    return str(request.param)


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
    engine = football_engine(env)
    for seed in (0, 2**31 - 1):
        engine.seed(seed)
        drawn = []
        for _ in range(3):
            engine.reset()
            drawn.append(engine.engine_seed)
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
    config = gfootball_config(stock)
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
