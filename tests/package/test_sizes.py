"""Nothing is larger than a reader takes in: the house style has the numbers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchrl_hts"
FOLDERS = ("torchrl_hts", "recipes", "benchmarks", "tests", "docs", "hydra_plugins")
FACE = PACKAGE / "collector" / "collector.py"  # of which two thirds are docstrings
STUDY = ROOT / "recipes" / "delay_study.py"  # many trainings, with plots and tables

MOST_ENTRIES, FILE_LINES, RECIPE_LINES, FUNCTION_LINES = 20, 400, 150, 60


def sources() -> list[Path]:
    """All files of Python."""
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Names of a file's functions, and how many lines they have apart from their docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) else None
            lines = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - lines


def test_a_listing_of_the_package_is_short() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__pycache__", "py.typed"}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    assert {p.name: n for p, n in lengths.items() if n > FILE_LINES and p != FACE} == {}


def test_recipes_are_short() -> None:
    lengths = {p: len(p.read_text().splitlines()) for p in (ROOT / "recipes").glob("*.py")}
    assert {p.name: n for p, n in lengths.items() if n > RECIPE_LINES and p != STUDY} == {}


def test_functions_are_short() -> None:
    found = [(path.name, *each) for path in sources() for each in functions(path)]
    assert [each for each in found if each[-1] > FUNCTION_LINES] == []
