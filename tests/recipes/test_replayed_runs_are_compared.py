"""A replay compares what it writes with what the run has written down, and tells of differences."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from recipe_runs import run
from replaying import replay

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")

COMPARED = re.compile(r"bit for bit: rows of metrics.csv \(\d+\), sets of parameters \(\d")


def test_parameters_are_compared_too(trained: Path) -> None:
    output = replay(trained, "--round", 21, "--env", 1)
    assert "from step-000000001280.pt" in output
    assert "seen from the checkpoint on" in output
    output = replay(trained, "--round", 17, "--env", 1, "--from-start")
    assert COMPARED.search(output)


def test_a_replay_ends_once_something_was_compared(changed: Path) -> None:
    *rows, last = (changed / "metrics.csv").read_text().splitlines(keepends=True)
    (changed / "metrics.csv").write_text("".join([*rows[:9], last]))  # no other after 1,024 steps
    output = replay(changed, "--round", 18, "--env", 2)
    assert output.endswith("bit for bit: sets of parameters (1)\n")


def test_parameters_that_a_run_ended_with_are_compared(changed: Path) -> None:
    """Where no row comes before."""
    *rows, _, last = (changed / "metrics.csv").read_text().splitlines(keepends=True)
    (changed / "metrics.csv").write_text("".join([*rows, last]))
    assert COMPARED.search(replay(changed, "--round", 21, "--env", 1))
    file = changed / "checkpoints" / "step-000000001536.pt"
    state = torch.load(file)
    value = next(iter(state["parts"]["collector"]["policy_state_dict"].values()))
    value += 1
    torch.save(state, file)
    output = replay(changed, "--round", 21, "--env", 1, code=1)
    assert re.search(rf"this is not the run .*: after 1,536 steps .* that of {file.name}", output)


def change_row(directory: Path, index: int) -> None:
    """Write another loss into a row of metrics."""
    with (directory / "metrics.csv").open() as lines:
        rows = [*csv.DictReader(lines)]
    rows[index]["loss/critic"] = "7.5"
    with (directory / "metrics.csv").open("w") as lines:
        writer = csv.DictWriter(lines, rows[0])
        writer.writeheader()
        writer.writerows(rows)


SAME = "why: the versions and the kind of CPU that its config.json names for these steps are the sa"


def test_what_is_not_the_run_is_told_with_the_reason(changed: Path) -> None:
    change_row(changed, 8)
    output = replay(changed, "--round", 17, code=1)
    assert "this is not the run as it was: after 1,152 steps loss/critic was 7.5 and is" in output
    assert SAME in output
    config = json.loads((changed / "config.json").read_text())
    config["starts"][0]["machine"]["cpu_capability"] = "ABACUS"
    (changed / "config.json").write_text(json.dumps(config))
    assert "cpu_capability was ABACUS and is" in replay(changed, "--round", 17, code=1)


def test_the_machine_is_that_of_the_steps_that_are_replayed(changed: Path) -> None:
    """A run that was begun elsewhere, and resumed here after 1,024 steps."""
    config = json.loads((changed / "config.json").read_text())
    config["starts"][0]["machine"]["cpu_capability"] = "ABACUS"
    (changed / "config.json").write_text(json.dumps(config))
    for newer in ("1280", "1536"):
        (changed / "checkpoints" / f"step-00000000{newer}.pt").unlink()
    run("ppo_cartpole.py", "--resume", str(changed))
    starts = json.loads((changed / "config.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 1024]
    change_row(changed, 8)
    assert SAME in replay(changed, "--round", 17, code=1)
    change_row(changed, 7)
    assert "cpu_capability was ABACUS" in replay(changed, "--round", 17, "--from-start", code=1)
