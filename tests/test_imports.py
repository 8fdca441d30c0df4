"""Imports run one way, and the path of an executor is free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchrl_hts"

# From the bottom up: a module may import only from those before it.
ORDER = [
    "versions", "wording", "statistics_table",
    "command_line", "system", "theory", "errors", "schedule", "exchange", "watching",
    "storage", "gathering", "recording", "messages",
    "worker_output", "surroundings", "worker_server", "undivided", "workers", "registrations",
    "servers",
    "ale_state", "state_names", "state_pickle",
    "factories",
    "old_api",
    "env_state", "generators", "env_spaces", "own_draws", "info", "values", "gym_actions",
    "gym_env", "trial_observations", "sizing", "probing", "forecast", "executor",
    "compiled", "entries", "slots", "primers", "torchrl_values", "torchrl_env", "invariance",
    "draws", "short_cut", "array_policy", "sampling", "policy_state", "written_once",
    "packed", "passes", "transposed", "trial_inputs", "policy_advice", "policy_trial",
    "batch_inference", "actor",
    "timeline_picture", "saved_state", "timeline", "statistics", "weights",
    "stock_arguments", "stock_attributes", "undelayed",
    "restarts", "pickling", "policy_forms", "batched_envs",
    "limits", "arguments", "batch_plan", "progress", "failures", "roster",
    "choosing", "staff", "crew", "learner", "collector", "delayed_gradient", "episodes", "video",
    "running_statistics", "playing", "evaluation", "configs", "from_config", "drawing", "testing",
    "costs", "other_load", "bench_report", "bench",
]  # fmt: skip
TORCH_FREE = ORDER[: ORDER.index("executor") + 1]


def imported(path: Path, *, lazily: bool) -> set[str]:
    """Modules of this package that a file imports, at its top or also inside functions."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if lazily else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_every_module_has_its_place() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_from_below(name: str) -> None:
    below = {f"torchrl_hts.{other}" for other in ORDER[: ORDER.index(name)]} | {"torchrl_hts.envs"}
    ours = {m for m in imported(PACKAGE / f"{name}.py", lazily=False) if "torchrl_hts" in m}
    assert ours <= below


@pytest.mark.parametrize("name", TORCH_FREE)
def test_no_torch_on_an_executors_path(name: str) -> None:
    top = imported(PACKAGE / f"{name}.py", lazily=False)
    assert not {m for m in top if m.split(".")[0] in ("torch", "torchrl", "tensordict")}


def test_delayed_gradient_does_not_know_the_collector() -> None:
    for name in ("delayed_gradient", "undelayed"):
        used = imported(PACKAGE / f"{name}.py", lazily=True)
        assert {m for m in used if m.startswith("torchrl_hts")} <= {"torchrl_hts.undelayed"}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.py")), ids=lambda p: p.name)
def test_recipes_use_public_names_only(path: Path) -> None:
    ours = {m for m in imported(path, lazily=True) if m.startswith("torchrl_hts")}
    assert ours <= {"torchrl_hts", "torchrl_hts.envs"}


def test_importing_the_package_and_its_environments_loads_no_torch() -> None:
    code = (
        "import sys, torchrl_hts, torchrl_hts.executor, torchrl_hts.envs\n"
        "print([m for m in ('torch', 'torchrl', 'tensordict') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
