"""What import-linter can't tell (setup.cfg has its rules): faces, recipes, and what gets loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchrl_hts"


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


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.py")), ids=lambda p: p.name)
def test_recipes_use_public_names_only(path: Path) -> None:
    found = {m for m in imported(path, lazily=True) if m.startswith("torchrl_hts")}
    assert found <= {"torchrl_hts", "torchrl_hts.envs", "torchrl_hts.testing"}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("_*/__init__.py")), ids=lambda p: p.parent.name
)
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
