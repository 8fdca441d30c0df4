"""What every test of faults has: nothing may be left, and what it has tried is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rounds import Rows, Tried


@pytest.fixture
def tried(nothing_left: None, record_property: Callable[[str, object], None]) -> Iterator[Tried]:
    """What this test tries."""
    Rows.compared = Rows.lost = 0
    yield Tried(record_property)
    record_property("rows", (Rows.compared, Rows.lost))
