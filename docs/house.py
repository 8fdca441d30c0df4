"""Draws the packages of torchrl_hts, in their layers and with their imports: ``house.py FILE.svg``.

The layers are those of setup.cfg, which `make lint` holds the code to. An arrow goes to what a
package imports; where a way through others says it already, it is left out.
"""

from __future__ import annotations

import ast
import configparser
import sys
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchrl_hts"

WIDTH, HEIGHT = 210, 92  # of a box
ACROSS, DOWN = 34, 46  # between boxes
MARGIN = 16


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


def picture() -> str:
    """The packages as SVG."""
    rows = layers()
    most = max(map(len, rows))
    width = 2 * MARGIN + most * WIDTH + (most - 1) * ACROSS
    height = 2 * MARGIN + len(rows) * HEIGHT + (len(rows) - 1) * DOWN
    place = {}
    for y, row in enumerate(rows):
        left = (width - len(row) * WIDTH - (len(row) - 1) * ACROSS) / 2
        for x, name in enumerate(row):
            place[name] = (left + x * (WIDTH + ACROSS), MARGIN + y * (HEIGHT + DOWN))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#7a8699"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
    ]
    for name, ends in sorted(reduced(imports([*place])).items()):
        x, y = place[name]
        for end in sorted(ends):
            to_x, to_y = place[end]
            start, stop = (x + WIDTH / 2, y + HEIGHT), (to_x + WIDTH / 2, to_y - 2)
            bend = (stop[1] - start[1]) / 2
            parts.append(
                f'<path d="M{start[0]} {start[1]}C{start[0]} {start[1] + bend} '
                f'{stop[0]} {stop[1] - bend} {stop[0]} {stop[1]}" fill="none" stroke="#7a8699" '
                'stroke-width="1.3" marker-end="url(#tip)"/>'
            )
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
