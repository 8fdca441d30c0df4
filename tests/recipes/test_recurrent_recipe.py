"""The recipe with a memory: the learner sees what the actors saw, and nothing else is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import script_paths  # noqa: F401  so that the scripts are found
import torch
from ppo_recurrent import Options, evaluate, to_play
from recipe_runs import run
from support.vectors import make_partly_hidden
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.modules import set_recurrent_mode

from torchrl_hts import HTSCollector

pytestmark = pytest.mark.usefixtures("nothing_left")

make_env = partial(make_partly_hidden, "CartPole-v1", "1,3")


def made(memory: bool = True) -> TensorDictSequential:
    """Actor and critic."""
    torch.manual_seed(0)
    return to_play(Options(hidden_units=8, memory=memory))[1]


def batches(policy: TensorDictSequential) -> Iterator[TensorDictBase]:
    """Rounds that episodes begin and end within, and that they go on over."""
    with HTSCollector(
        [make_env] * 3, policy, frames_per_batch=3 * 12, total_frames=3 * 12 * 6, seed=0
    ) as collector:
        for batch in collector:
            yield batch.clone()


def over_rows(network: nn.Module, batch: TensorDictBase) -> TensorDictBase:
    """What the learner computes."""
    with torch.no_grad(), set_recurrent_mode(True):
        return network(batch.clone())


def test_the_learner_runs_the_memories_as_the_actors_did() -> None:
    policy = made()
    actor, critic = policy.module
    began, went_on = 0, 0
    for batch in batches(policy):
        torch.testing.assert_close(over_rows(actor, batch)["logits"], batch["logits"])
        torch.testing.assert_close(over_rows(critic, batch)["state_value"], batch["state_value"])
        forgetting = batch.clone()
        forgetting["actor_state"].zero_()
        differ = (over_rows(actor, forgetting)["logits"] - batch["logits"]).abs()[:, 0, 0] > 1e-5
        assert torch.equal(differ, ~batch["is_init"][:, 0, 0]), "a row goes on, or begins anew"
        began += int(batch["is_init"][:, 1:].sum())
        went_on += int(differ.sum())
    assert began
    assert went_on


def test_values_are_those_of_the_steps_and_of_the_steps_after_them() -> None:
    policy = made()
    critic = policy.module[1]
    last = None
    for batch in batches(policy):
        acted = batch["state_value"].clone()
        evaluate(critic, batch)
        torch.testing.assert_close(batch["state_value"], acted)
        after, goes_on = batch["next", "state_value"], ~batch["next", "done"]
        torch.testing.assert_close(after[:, :-1][goes_on[:, :-1]], acted[:, 1:][goes_on[:, :-1]])
        if last is not None:  # a round's first step is the one after the last of the round before
            values, rows = last
            torch.testing.assert_close(values[rows], acted[:, 0][rows])
        last = after[:, -1], goes_on[:, -1]


def test_without_memory_a_step_alone_counts(tmp_path: Path) -> None:
    policy = made(memory=False)
    for batch in batches(policy):
        order = torch.randperm(batch.shape[1])
        found = over_rows(policy, batch[:, order])["logits"]
        torch.testing.assert_close(found, batch["logits"][:, order])
    flags = "ppo_recurrent.py --no-memory --num-envs 2 --sync-interval 8 --minibatch-size 8"
    flags += " --total-frames 32 --eval-interval 0 --log-interval 16"
    assert "32 steps (100%)" in run(flags, "--output-dir", str(tmp_path / "run"))


def test_some_entries_are_hidden() -> None:
    whole, partly = gym.make("CartPole-v1"), make_env(render_mode="rgb_array")
    assert partly.render_mode == "rgb_array"
    assert partly.observation_space.shape == (2,)
    seen = partly.reset(seed=5)[0]
    assert seen in partly.observation_space
    assert np.array_equal(seen, whole.reset(seed=5)[0][[0, 2]])
    assert make_partly_hidden("CartPole-v1", "").observation_space == whole.observation_space


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hide 1,4", "--hide '1,4' must name some of the entries 0 to 3"),
        ("--hide 0,1,2,3", "such as 1,3, but not all"),
        ("--hide speed", "--hide 'speed' must name"),
        ("--env-id Pendulum-v1", "plays environments with Discrete actions"),
        ("--minibatch-size 48", "--minibatch-size 48 is no number of whole rows, which have 32"),
    ],
)
def test_bad_input_is_one_clear_message(flags: str, message: str, tmp_path: Path) -> None:
    said = run(f"ppo_recurrent.py {flags}", "--output-dir", str(tmp_path / "run"), code=1)
    assert message in said
    assert "Traceback" not in said
