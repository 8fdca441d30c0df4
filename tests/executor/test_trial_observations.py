"""What an environment shows before a run, which leaves it as it was."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest
import torch
from probe import limit_observing
from showing import Shows, floats, show_draws, show_episodes

from torchrl_hts._executor.trial_observations import (
    at_resets,
    gym_observations,
    observed,
    observed_and_restored,
    own_generators,
)


def test_what_takes_too_long_is_cut_off_and_then_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_observing(monkeypatch, all_s=1)
    handler = signal.getsignal(signal.SIGALRM)
    assert observed_and_restored(Shows(floats(2), lambda _: signal.pause())) == (None, False)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_what_can_not_be_saved_is_left_alone() -> None:
    env = Shows(floats(2), show_episodes, unsaved=True)
    assert observed_and_restored(env) == (None, True)
    assert env.episodes == 0
    assert observed(lambda: gym_observations(env)) is not None
    assert env.episodes == 4


def test_what_can_be_saved_is_put_back() -> None:
    env = Shows(floats(2), show_episodes)
    found, is_back = observed_and_restored(env)
    assert found is not None
    assert found.values["observation",][:, 0].tolist() == [1, 2, 3, 4]
    assert (is_back, env.episodes) == (True, 0)


def test_generators_are_as_they_were() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]

    draws = []
    for is_observed in (False, True):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        if is_observed:
            env = Shows(floats(2), show_draws)
            with own_generators():
                seen = [gym_observations(env).values["observation",]]
                draw()
            with own_generators():
                seen.append(gym_observations(env).values["observation",])
            assert (seen[0] == seen[1]).all()
        draws.append(draw())
    assert draws[0] == draws[1]


def test_resets_are_few_and_fewer_where_they_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_resets(lambda seed: seed) == [0, 1, 2, 3]
    assert at_resets(lambda seed: seed, ["known"]) == ["known", 1, 2, 3]
    limit_observing(monkeypatch, resets_s=0.0)
    assert at_resets(lambda seed: seed) == [0]


def test_large_observations_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Shows(floats(2), show_episodes)
    assert gym_observations(env).num_resets == 4
    limit_observing(monkeypatch, most_bytes=17)
    assert gym_observations(env).num_resets == 2
    limit_observing(monkeypatch, most_bytes=1)
    assert gym_observations(env).num_resets == 1
