"""Tests look inside through `tests/support/probe.py` alone, and leave clocks as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROBE = TESTS / "support" / "probe.py"

# Underscored, and yet what their documentation tells one to use; or a subclass's own.
PUBLIC = {"os._exit", "sys._getframe", "_replace", "_asdict"}
# The compiler's table of what is caught where: only in the test that stops at every such place.
PUBLIC |= {"dis._parse_exception_table"}
OWNERS = {"self", "cls", "super()", "torchrl_hts"}  # the last is the path of a module
CLOCKS = {"time", "sleep", "monotonic", "perf_counter", "process_time", "time_ns"}
CLOCKS |= {"monotonic_ns", "perf_counter_ns", "process_time_ns"}
SETTERS = {"setattr", "getattr", "delattr", "object", "patch"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def text_of(node: ast.AST) -> str | None:
    """A string as far as it is known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "0" for part in node.values)
    return None


def looks_inside(source: str) -> Iterator[str]:
    """What a test's source, or a script within it, reads or sets that is not for it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner not in OWNERS and not {node.attr, f"{owner}.{node.attr}"} & PUBLIC:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif (
            isinstance(node, ast.Call)
            and node.args
            and ast.unparse(node.func).split(".")[-1] in SETTERS
        ):
            own = ast.unparse(node.args[0]) in OWNERS
            for name in filter(None, map(text_of, node.args[:2])):
                last = name.split(".")[-1]
                if (is_private(last) and not own) or last in CLOCKS:
                    yield ast.unparse(node)
        elif (text := text_of(node)) and "\n" in text:
            try:
                yield from looks_inside(text)
            except SyntaxError:
                continue  # no script


def test_tests_look_inside_through_the_probe_alone() -> None:
    """What is found here is asked in public, or becomes a question in the probe."""
    paths = set(TESTS.rglob("*.py")) - {PROBE, Path(__file__)}
    found = {path.name: [*looks_inside(path.read_text())] for path in paths}
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.parametrize(
    "source",
    [
        "collector._workers",
        "collector.schedule._steps[0] = 1",
        "from torchrl_hts.configs.make import _TARGET",
        'patch.setattr(module, "_LIMIT", 1)',
        'patch.setattr("torchrl_hts.envs.atari._LIMIT", 1)',
        'monkeypatch.setattr(time, "monotonic", clock)',
        'monkeypatch.setattr("module.time.sleep", print)',
        'monkeypatch.setattr(module, "time", clock)',
        'SCRIPT = """\nprint(collector._workers)\n"""',
        'f"{x}\\nprint(collector._workers)\\n"',
    ],
)
def test_what_is_not_for_tests_is_found(source: str) -> None:
    assert [*looks_inside(source)]


@pytest.mark.parametrize(
    "source",
    [
        "self._poll = torchrl_hts._processes.messages.pickled",
        'patch.setattr("torchrl_hts._evaluation.player.send_object", send)',
        "from torchrl_hts._rounds.exchange import Inbox",
        "config._target_, item.__class__, one._replace(came=True), os._exit(1)",
        "getattr(super()._expect(env), self._name), getattr(self, f'_{name}')",
    ],
)
def test_what_is_for_all_is_left_alone(source: str) -> None:
    assert not [*looks_inside(source)]
