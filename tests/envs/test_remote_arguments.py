"""What make_remote refuses before Ray is asked for an actor; without Ray."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from torchrl_hts.envs import make_remote


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"factory": "CartPole-v1"}, TypeError, r"takes a factory.*got 'CartPole-v1'\. Give a"),
        ({"factory": gym.Env()}, TypeError, r"takes a factory.*got <.*Env"),
        ({"start_timeout_s": 0}, ValueError, "start_timeout_s must be more than 0 seconds"),
        ({"start_timeout_s": -1}, ValueError, "start_timeout_s must be more than 0 seconds"),
        ({"start_timeout_s": None}, TypeError, "start_timeout_s must be a number of seconds"),
        ({"runtime_env": {"env_vars": "A=1"}}, TypeError, "the env_vars of .* must be a dict"),
        ({"runtime_env": "."}, TypeError, r"a dict, as .*'working_dir': '\.'.*got '\.'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make_remote(**{"factory": gym.Env, **options})


def test_options_that_would_change_an_episode_unseen_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no lifetime='detached' and no max_restarts=-1: .*'restart'"
    ):
        make_remote(gym.Env, max_restarts=-1, lifetime="detached")
    with pytest.raises(ValueError, match=r"no get_if_exists=True: .* share its actor"):
        make_remote(gym.Env, name="simulator", get_if_exists=True)
