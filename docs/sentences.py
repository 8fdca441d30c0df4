"""Find sentences that are too long to read: ``python docs/sentences.py [--most 40] PATH ...``."""

from __future__ import annotations

import argparse
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


def _pages(path: Path) -> list[Path]:
    return sorted(path.glob("**/*.md")) if path.is_dir() else [path]


def main() -> int:
    """Print every sentence that is too long; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="pages, or folders of pages")
    parser.add_argument("--most", type=int, default=40, help="words")
    options = parser.parse_args()
    found = 0
    pages = [page for path in options.paths for page in _pages(path)]
    for path in pages:
        for sentence in sentences(path.read_text()):
            words = len(sentence.split())
            if words > options.most:
                found += 1
                sys.stderr.write(f"{path}: {words} words: {sentence}\n")
    if found:
        sys.stderr.write(f"{found} sentences of more than {options.most} words\n")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
