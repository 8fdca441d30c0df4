"""What every test of faults has: nothing may be left, and what it has tried is counted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from processes import COLLECTORS_OWN, open_descriptors
from rounds import Rows, Tried


@pytest.fixture
def tried(nothing_left: None, record_property: Callable[[str, object], None]) -> Iterator[Tried]:
    """What this test tries."""
    Rows.compared = Rows.lost = 0
    before = open_descriptors(*COLLECTORS_OWN)
    yield Tried(record_property)
    record_property("rows", (Rows.compared, Rows.lost))
    gc.collect()
    left = open_descriptors(*COLLECTORS_OWN) - before
    record_property("left", len(left))
    assert not left
