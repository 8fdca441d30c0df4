"""Batches of TorchRL's environments, each a unit of the schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from collectors import start
from policies import categorical
from tensordict import TensorDictBase
from torchrl_environments import Clocks

pytestmark = [pytest.mark.usefixtures("collectors_end"), pytest.mark.timeout(120)]

LENGTHS = (2, 5, 3, 4, 6, 7)
K, ALPHA = len(LENGTHS), 4
ALONE = [partial(Clocks, length, alone=True) for length in LENGTHS]


def collect(envs: list[Any], rounds: int = 4, **kwargs: Any) -> TensorDictBase:
    """All that is collected, ``[K, rounds * alpha]``."""
    kwargs = {"policy": categorical(3, 3)} | kwargs
    with start(
        envs, frames_per_batch=K * ALPHA, total_frames=K * ALPHA * rounds, **kwargs
    ) as collector:
        return torch.cat(list(collector), 1)


def test_the_data_are_those_of_single_environments() -> None:
    """I7: whoever steps them, in batches of whatever size."""
    expected = collect(ALONE)
    assert (collect([partial(Clocks, *LENGTHS)]) == expected).all()
    mixed = [partial(Clocks, 2, 5, 3), *ALONE[3:5], partial(Clocks, 7)]
    assert (collect(mixed, num_executors=2, num_actors=2) == expected).all()
    assert len(expected["collector", "traj_ids"].unique()) > 3 * K


def test_what_can_not_be_saved_begins_new_episodes_and_says_so() -> None:
    envs = [partial(Clocks, *LENGTHS)]
    kwargs: dict[str, Any] = {"policy": categorical(3, 3), "frames_per_batch": K * ALPHA, "lag": 0}
    with start(envs, **kwargs) as collector:
        next(iter(collector))
        state = collector.state_dict()
    with start(envs, **kwargs) as collector:
        with pytest.warns(UserWarning, match=r"begin new episodes.*environments 0 to 5: a TorchRL"):
            collector.load_state_dict(state)
        batch = next(iter(collector))
    assert (batch["observation"][:, 0, 1] == 0).all()
    assert len(batch["collector", "traj_ids"][:, 0].unique()) == K
