"""Find sentences that are too long to read: ``python docs/sentences.py [--most 30] PATH ...``.

Read are pages of Markdown, and the docstrings of Python; of a folder, all that it holds.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"^(```|:::).*?^\1", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^(?: {4}|\t).*$", re.MULTILINE)
_TABLE = re.compile(r"^\s*\|.*$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*>#]|\d+\.)\s)")
# A full stop ends a sentence where a capital, or something set apart, follows it.
_END = re.compile(r"(?<=[.!?:;])\**\s+(?=[A-Z`*\[(\"])")

_SECTION = re.compile(r"(Args|Keyword Args|Attributes|Raises|Returns|Yields|Example):")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page of Markdown, without code and tables.

    Example:
        >>> list(sentences("# A title\\n\\nOne sentence. Another.\\n\\n    code"))
        ['# A title', 'One sentence.', 'Another.']
    """
    for pattern in (_BLOCK, _TABLE, _INDENTED):
        text = pattern.sub("", text)
    text = _LINK.sub(r"\1", text)
    for paragraph in _PARAGRAPH.split(text):
        for sentence in _END.split(" ".join(paragraph.split())):
            if sentence:
                yield sentence


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, with what is said of each argument as a paragraph of its own.

    Example:
        >>> list(docstrings("'Doubles.\\\\n\\\\nArgs:\\\\n    a: one.\\\\n    b: two.'"))
        ['Doubles.\\n\\n\\na: one.\\n\\nb: two.']
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found:
                yield "\n".join(_without_sections(found.split("\n")))


def _without_sections(lines: list[str]) -> Iterator[str]:
    section = ""
    for line in lines:
        header = _SECTION.fullmatch(line)
        if header or (line and not line.startswith(" ")):
            section = header[1] if header else ""
        if header or section == "Example":
            continue
        if section in ("", "Returns", "Yields"):
            yield line[4:] if section else line
        else:
            yield ("\n" if re.match(r" {4}\S", line) else "") + line.strip()


def _pages(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(each for each in path.rglob("*") if each.suffix in (".md", ".py"))


def _texts(path: Path) -> Iterator[str]:
    text = path.read_text()
    return docstrings(text) if path.suffix == ".py" else iter([text])


def main() -> int:
    """Print every sentence that is too long; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="pages, modules, or folders of them")
    parser.add_argument("--most", type=int, default=30, help="words (30)")
    options = parser.parse_args()
    found = 0
    pages = [page for path in options.paths for page in _pages(path)]
    for path in pages:
        for sentence in (each for text in _texts(path) for each in sentences(text)):
            words = len(sentence.split())
            if words > options.most:
                found += 1
                sys.stderr.write(f"{path}: {words} words: {sentence}\n")
    if found:
        sys.stderr.write(f"{found} sentences of more than {options.most} words\n")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
