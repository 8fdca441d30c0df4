"""Draws the packages of torchrl_hts, in their layers and with their imports: ``house.py FILE.svg``.

The layers are those of setup.cfg, which `make lint` holds the code to. An arrow goes to what a
package imports; where a way through others says it already, it is left out. It runs between boxes,
never behind one, so that what it passes isn't taken for where it ends.
"""

from __future__ import annotations

import ast
import configparser
import itertools
import sys
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchrl_hts"

WIDTH, HEIGHT = 210, 96  # of a box
ACROSS, DOWN = 42, 46  # between boxes
MARGIN = 34
APART = 9  # arrows that take the same gap


def layers() -> list[list[str]]:
    """The packages of each layer, from the top down."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["importlinter:contract:layers"]["layers"].split("\n")
    return [line.split(" | ") for line in lines if line and not line.startswith("#")]


def _files(name: str) -> list[Path]:
    folder = PACKAGE / name
    return sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def _imported(path: Path) -> set[str]:
    """Packages that a file imports, but for those that only its types name."""
    tree = ast.parse(path.read_text())
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    modules = [
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in typing
    ]
    return {name.split(".")[1] for name in modules if name.startswith("torchrl_hts.")}


def imports(names: list[str]) -> dict[str, set[str]]:
    """What each package imports of the others."""
    return {
        name: set.union(*(_imported(path) for path in _files(name))) & {*names} - {name}
        for name in names
    }


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that a longer way says already.

    Example:
        >>> reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()})["a"]
        {'b'}
    """
    below: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in below:
            below[name] = graph[name].union(*(reach(other) for other in graph[name]))
        return below[name]

    return {name: ends - set().union(*map(reach, ends)) for name, ends in graph.items()}


def _meaning(name: str) -> str:
    docstring = ast.get_docstring(ast.parse(_files(name)[0].read_text())) or ""
    return docstring.split("\n\n")[0].split(". ")[0].split(": ``")[0].replace("\n", " ").rstrip(".")


def way(start: float, end: float, rows: list[list[float]]) -> list[float]:
    """The shortest way from ``start`` to ``end``: one of the places of each row in between.

    Example:
        >>> way(0, 10, [[-20, 5], [8, 20]])
        [5, 8]
    """
    best: dict[float, tuple[float, list[float]]] = {start: (0, [])}
    for row in rows:
        best = {
            place: min(
                (cost + abs(place - x), [*taken, place]) for x, (cost, taken) in best.items()
            )
            for place in row
        }
    return min((cost + abs(end - x), taken) for x, (cost, taken) in best.items())[1]


def _arrow(points: list[tuple[float, float]]) -> str:
    """A path through points: a curve, then a straight line past a row of boxes, and so on."""
    path = f"M{points[0][0]:g} {points[0][1]:g}"
    for number, ((x, y), (to_x, to_y)) in enumerate(itertools.pairwise(points)):
        half = (y + to_y) / 2
        curve = f"C{x:g} {half:g} {to_x:g} {half:g} {to_x:g} {to_y:g}"
        path += f"L{to_x:g} {to_y:g}" if number % 2 else curve
    return (
        f'<path d="{path}" fill="none" stroke="#7a8699" stroke-width="1.3" marker-end="url(#tip)"/>'
    )


def _ports(ends: list[tuple[str, str]], place: dict[str, tuple[float, float]]) -> dict[str, float]:
    """How far from the middle of the first box each arrow to or from the second one ends."""
    ports = {}
    for box in {box for box, _ in ends}:
        others = sorted((place[other][0], other) for each, other in ends if each == box)
        for index, (_, other) in enumerate(others):
            ports[f"{box} {other}"] = 18 * (index - (len(others) - 1) / 2)
    return ports


def picture() -> str:
    """The packages as SVG."""
    rows = layers()
    most = max(map(len, rows))
    width = 2 * MARGIN + most * WIDTH + (most - 1) * ACROSS
    height = 2 * MARGIN + len(rows) * HEIGHT + (len(rows) - 1) * DOWN
    place, floor, gaps = {}, {}, []
    for y, row in enumerate(rows):
        left = (width - len(row) * WIDTH - (len(row) - 1) * ACROSS) / 2
        for x, name in enumerate(row):
            place[name] = (left + x * (WIDTH + ACROSS), MARGIN + y * (HEIGHT + DOWN))
            floor[name] = y
        gaps.append([left - ACROSS / 2 + x * (WIDTH + ACROSS) for x in range(len(row) + 1)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#7a8699"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
    ]
    arrows = [(a, b) for a, ends in reduced(imports([*place])).items() for b in sorted(ends)]
    out, into = _ports(arrows, place), _ports([(b, a) for a, b in arrows], place)
    lanes: dict[tuple[int, float], int] = {}
    for name, end in sorted(arrows):
        start_x = place[name][0] + WIDTH / 2 + out[f"{name} {end}"]
        end_x = place[end][0] + WIDTH / 2 + into[f"{end} {name}"]
        between = range(floor[name] + 1, floor[end])
        points = [(start_x, place[name][1] + HEIGHT)]
        for row, gap in zip(between, way(start_x, end_x, [gaps[y] for y in between]), strict=True):
            lane = lanes[row, gap] = lanes.get((row, gap), -1) + 1
            x = gap + APART * ((lane + 1) // 2) * (-1) ** lane
            top = MARGIN + row * (HEIGHT + DOWN)
            points += [(x, top), (x, top + HEIGHT)]
        parts.append(_arrow([*points, (end_x, place[end][1] - 2)]))
    for name, (x, y) in place.items():
        fill = "#eef2f8" if name.startswith("_") else "#fdf0d8"
        parts.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" '
            'stroke="#4a5a75"/>'
            f'<text x="{x + 10}" y="{y + 22}" font-size="15" font-weight="bold" '
            f'fill="#1d2738">{name}</text>'
        )
        for line, text in enumerate(textwrap.wrap(_meaning(name), 34)[:4]):
            parts.append(
                f'<text x="{x + 10}" y="{y + 41 + 15 * line}" font-size="12" '
                f'fill="#1d2738">{escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
