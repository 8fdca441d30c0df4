"""The rows of the README's table: what is measured for each, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from importlib.util import find_spec
from typing import NamedTuple

from _measurements import Record
from _report import Cell, failures_of, speeds_of

__all__ = ["ROWS", "Row", "print_readme", "rows_that_run"]

_FOOTBALL = "gfootball/academy_3_vs_1_with_keeper"
_TORCHRL = ("serial", "parallel", "multi-sync", "multi-async", "async-batched")


class Row(NamedTuple):
    """A row, and who is measured for it beside HTSCollector."""

    words: str
    cell: Cell
    others: tuple[str, ...]


_ASYNC, _GAMES = ("multi-async",), ("loop-ale", "loop-envpool")
ROWS = [
    Row(
        "Pong, A2C, batches of 5 steps",
        Cell("pong", "a2c5", 16),
        ("multi-async", "multi-sync", *_GAMES, "sample-factory", "sb3"),
    ),
    Row("the same with 64 environments", Cell("pong", "a2c5", 64), (*_ASYNC, *_GAMES)),
    Row(
        "football, A2C, batches of 20 steps",
        Cell(_FOOTBALL, "a2c20", 16),
        ("multi-async", "multi-sync", "sample-factory"),
    ),
    Row("football, PPO, 4 epochs", Cell(_FOOTBALL, "ppo", 16), ("multi-async", "multi-sync")),
    Row(
        "CartPole, A2C, batches of 5 steps",
        Cell("cartpole", "a2c5", 16),
        (*_ASYNC, "sb3", "loop-vector", "loop-envpool"),
    ),
    Row(
        "environments that cost nothing, collecting only",
        Cell("costless", "collect", 16),
        (*_ASYNC, "multi-sync", "serial", "loop-vector", "sb3"),
    ),
]


def rows_that_run(lacking: Collection[str]) -> list[Row]:
    """The rows whose environments are installed, without the contenders that are not.

    Args:
        lacking: contenders that can't run here.
    """
    engine = find_spec("gfootball") is not None
    return [
        row._replace(others=tuple(name for name in row.others if name not in lacking))
        for row in ROWS
        if engine or row.cell.workload != _FOOTBALL
    ]


def print_readme(records: list[Record], lacking: Collection[str]) -> None:
    """The README's table, of what has been measured, and who was measured for each row.

    Args:
        records: all that has been measured.
        lacking: contenders that can't run here.
    """
    print(
        "\n| workload | `HTSCollector`, lag 1 | x best TorchRL collector | x best of everything |"
    )
    print("| --- | --- | --- | --- |")
    for row in ROWS:
        speeds = {n: statistics.median(s) for n, s in speeds_of(records, row.cell).items()}
        if (own := speeds.pop("hts", None)) is None or not speeds:
            print(f"| {row.words} | not measured | | |")
            continue
        stock = [speed for name, speed in speeds.items() if name in _TORCHRL]
        best = max(speeds, key=lambda name: speeds[name])
        by_stock = f"{own / max(stock):.2f}" if stock else "not measured"
        named = "" if best in _TORCHRL else f" ({best})"
        print(f"| {row.words} | {own:,.0f} | {by_stock} | {own / speeds[best]:.2f}{named} |")
    print("\nEverything is, by row:")
    for row in ROWS:
        print(f"- {row.words}: {_who(row, records, lacking)}")


def _who(row: Row, records: list[Record], lacking: Collection[str]) -> str:
    """Who was measured beside HTSCollector; who failed, isn't installed, or is still to come."""
    failed = {name for name, _ in failures_of(records, row.cell)}
    found: dict[str, list[str]] = {}
    measured = speeds_of(records, row.cell)
    for name in row.others:
        if name in measured:
            kind = "measured"
        elif name in failed:
            kind = "failed"
        else:
            kind = "not installed" if name in lacking else "not measured"
        found.setdefault(kind, []).append(name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in found.items())
