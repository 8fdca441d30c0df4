"""Imports run one way, and the path of an executor is free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchrl_hts"

# From the bottom up: what is in a line may import only from lines before it, and from itself.
LAYERS = [
    ["_versions", "errors", "theory", "delayed_gradient"],
    ["_processes", "env_state"],
    ["_rounds"],
    ["_executor", "_policy"],
    ["_actor", "_reports", "envs"],
    ["_planning", "_supervision"],
    ["_learner", "_evaluation"],
    ["collector"],
    ["bench", "configs"],
    ["testing"],
]
# To be mended.
KNOWN = {
    ("_planning.arguments", "_supervision.restarts"),
    ("_supervision.workers", "_planning.pass_times"),
    ("_supervision.workers", "_planning.worker_counts"),
}
TORCH = {"torch", "torchrl", "tensordict"}
TORCH_FREE = ["_processes", "_rounds", "_executor", "env_state", "envs"]
WITH_TORCH = {
    "_executor.primers",
    "_executor.torchrl_env",
    "_executor.torchrl_values",
    "_rounds.entries",
    "_rounds.slots",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path: Path, *, lazily: bool) -> set[str]:
    """Modules that a file imports, at its top or also inside functions."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if lazily else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def ours(names: set[str]) -> set[str]:
    return {name.removeprefix("torchrl_hts.") for name in names if name.startswith("torchrl_hts.")}


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_module_has_its_place() -> None:
    tops = {name_of(path).split(".")[0] for path in MODULES}
    assert tops == {name for layer in LAYERS for name in layer}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_below(path: Path) -> None:
    top = name_of(path).split(".")[0]
    below = {top}
    for layer in LAYERS:
        if top in layer:
            break
        below |= set(layer)
    found = ours(imported(path, lazily=False))
    wrong = {name for name in found if name.split(".")[0] not in below}
    assert wrong == {of for by, of in KNOWN if by == name_of(path)}


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.parts[len(PACKAGE.parts)] in TORCH_FREE], ids=name_of
)
def test_no_torch_on_an_executors_path(path: Path) -> None:
    top = {name.split(".")[0] for name in imported(path, lazily=False)}
    assert bool(top & TORCH) == (name_of(path) in WITH_TORCH)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.py")), ids=lambda p: p.name)
def test_recipes_use_public_names_only(path: Path) -> None:
    found = {m for m in imported(path, lazily=True) if m.startswith("torchrl_hts")}
    assert found <= {"torchrl_hts", "torchrl_hts.envs"}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("_*/__init__.py")), ids=name_of)
def test_a_private_package_imports_nothing_by_itself(path: Path) -> None:
    assert imported(path, lazily=True) == set()


def test_importing_the_package_and_its_environments_loads_no_torch() -> None:
    code = (
        "import sys, torchrl_hts, torchrl_hts._executor.loop, torchrl_hts.envs\n"
        "print([m for m in ('torch', 'torchrl', 'tensordict') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
