"""Checkpoints that are whole, and that a run can't go on from: each is refused in one sentence."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from recipe_options import Options
from support.checkpoints import Checkpoints
from support.errors import RecipeError, exit_with
from support.old_runs import newest_step
from support.options import to_json
from support.states import FORMAT, random_states, take_on, versions
from torch import nn

from torchrl_hts import PolicyError


class Collector:
    """What the rest of a run has to do with one."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def state_dict(self) -> dict[str, Any]:
        return {"policy_state_dict": self.policy.state_dict()}

    def load_state_dict(self, states: list[Any]) -> None:
        (state,) = states
        self.policy.load_state_dict(state["policy_state_dict"])


def run_parts(inputs: int = 4) -> dict[str, Any]:
    """Of a run whose environment has so many observations."""
    policy = nn.Linear(inputs, 2)
    return {"collector": Collector(policy), "optimizer": torch.optim.Adam(policy.parameters())}


def saved() -> dict[str, Any]:
    """A checkpoint, with what the first learner keeps of evaluations."""
    parts = {name: part.state_dict() for name, part in run_parts().items()}
    return {
        "format": FORMAT,
        "recipe": "ppo",
        "options": to_json(Options()),
        "versions": versions(),
        "id": "a",
        "step": 7,
        "rows": 0,
        "elapsed_s": 1.0,
        "random_states": random_states(),
        "parts": parts | {"evaluations": {}},
    }


def go_on(
    state: dict[str, Any],
    parts: dict[str, Any],
    *,
    options: Options = Options(),  # noqa: B008  it is frozen
    own: tuple[str, ...] = ("collector",),
    learners: int = 1,
) -> None:
    """As a run does that is resumed."""
    take_on(
        state,
        Path("run/checkpoints/step-7.pt"),
        recipe="ppo",
        options=options,
        parts=parts,
        own=own,
        of_learners=lambda: [state["parts"]],
        learners=learners,
    )


def test_one_that_fits_is_taken_on() -> None:
    state, parts = saved(), run_parts()
    go_on(state, parts)
    wanted = state["parts"]["collector"]["policy_state_dict"]
    assert all(torch.equal(v, wanted[k]) for k, v in parts["collector"].policy.state_dict().items())


def test_an_environment_whose_spaces_have_changed() -> None:
    with pytest.raises(
        RecipeError,
        match=r"weight is of shape \[2, 4\] there and of shape \[2, 5\] here; the environment's sp",
    ):
        go_on(saved(), run_parts(inputs=5))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("parts"), "damaged, or of another version (KeyError: 'parts'): resume"),
        (lambda s: s.pop("rows"), "damaged, or of another version (KeyError: 'rows'): resume"),
        (lambda s: s["parts"].update(optimizer={}), "(KeyError: 'param_groups'): resume with"),
        (lambda s: s["parts"].update(collector=[1]), "(TypeError: list indices must be"),
        (lambda s: s.update(random_states={}), "(KeyError: 'torch'): resume with the version"),
        (lambda s: s.update(format=1), "of recipe 'ppo', format 1; this is 'ppo', format 2"),
        (lambda s: s.update(recipe="a2c"), "of recipe 'a2c', format 2; this is 'ppo', format 2"),
        (
            lambda s: s["parts"].pop("optimizer"),
            "holds collector, evaluations; this run has collector, optim",
        ),
        (
            lambda s: s["options"].update(seed=8),
            "of another configuration: --seed was 8 and is 0. Put the run's config.json back",
        ),
        (lambda s: s["versions"].update(torch="1.0"), "with other versions: torch was 1.0 and is"),
    ],
)
def test_what_is_damaged_or_of_another_version(
    damage: Callable[[dict[str, Any]], Any], message: str
) -> None:
    state = saved()
    damage(state)
    with pytest.raises(RecipeError) as refusal:
        go_on(state, run_parts())
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("ignored", [False, True])
def test_another_number_of_learners_is_told_only_what_helps(ignored: bool) -> None:
    """What each learner has beside its environments is not shared out anew in any case."""
    options = Options(ignore_versions=ignored)
    with pytest.raises(RecipeError, match=r"1 learners.* are 2\..* optimizer of each: start a"):
        go_on(saved(), run_parts(), options=options, own=("collector", "optimizer"), learners=2)
    if ignored:
        go_on(saved(), run_parts(), options=options, learners=2)
    else:
        with pytest.raises(RecipeError, match=r"gives other bits: .* or pass --ignore-versions to"):
            go_on(saved(), run_parts(), options=options, learners=2)


def test_what_the_package_says_is_left_as_it_is() -> None:
    class Refuses(Collector):
        def load_state_dict(self, states: list[Any]) -> None:
            raise PolicyError("not this one")

    parts = run_parts()
    with pytest.raises(PolicyError, match="not this one"):
        go_on(saved(), {**parts, "collector": Refuses(parts["collector"].policy)})


def test_files_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert newest_step(tmp_path) is None
    checkpoints.save(5, {"step": 5})
    (checkpoints.directory / "step-last.pt").touch()
    assert newest_step(tmp_path) == 5
    assert checkpoints.load() == {"step": 5}


def test_a_file_that_is_in_the_way_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        exit_with(lambda: tmp_path.open())
    assert (
        capsys.readouterr().err == f"error: {tmp_path} can't be read or written: Is a directory\n"
    )

    def fails() -> int:
        raise OSError(errno.EIO, "a bug of ours")

    with pytest.raises(OSError, match="a bug of ours"):
        exit_with(fails)


@pytest.mark.parametrize("recipe", ["ppo_cartpole", "ppo_mujoco", "ppo_recurrent"])
def test_an_environment_that_raises_while_it_is_made(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = importlib.import_module("support.start")
    options = importlib.import_module(recipe).Options(env_id="walks:Falls-v0")
    with pytest.raises(SystemExit) as end:
        start.check_task_or_exit(options)
    assert str(end.value).startswith(
        "error: walks:Falls-v0 can't be made: OverflowError: there is no ground ("
    )
    assert "walks.py, line" in str(end.value)
    assert gym.spec("Falls-v0")
