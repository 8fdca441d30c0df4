"""Benchmarks measure the checkout that they are in, whatever package is installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the scripts are found
from _recipes import environment
from script_paths import BENCHMARKS, RECIPES, ROOT

SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("[!_]*.py"))
OWN = {path.stem for path in RECIPES.glob("*.py")} | {"support", "torchrl_hts"}


def imported(module: str, seen: set[str]) -> Iterator[str]:
    """What a benchmark imports at its top, in order, by way of its neighbours too."""
    seen.add(module)
    for node in ast.parse((BENCHMARKS / f"{module}.py").read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in (each.partition(".")[0] for each in names):
            if (BENCHMARKS / f"{name}.py").exists() and name not in seen:
                yield from imported(name, seen)
            yield name


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_finds_its_own_checkout(script: str) -> None:
    """Before it imports a recipe or the package for the first time, the path leads here."""
    order = list(imported(script, set()))
    first = next((at for at, name in enumerate(order) if name in OWN), None)
    assert first is None or "_recipes" in order[:first]


def test_children_find_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another one comes first in what they inherit."""
    (tmp_path / "torchrl_hts").mkdir()
    (tmp_path / "torchrl_hts" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import importlib.util as u; print(u.find_spec('torchrl_hts').origin)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd="/")
    assert found.stdout.strip() == str(ROOT / "torchrl_hts" / "__init__.py")
    assert environment()["PYTHONPATH"].split(os.pathsep)[-1] == str(tmp_path)
