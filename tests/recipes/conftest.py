"""What the tests of several recipes share."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from warm_recipes import WarmRecipe


@pytest.fixture(scope="module")
def warm_recipes() -> Iterator[Callable[[str], WarmRecipe]]:
    """Recipes that are cheap to start, by their names."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda recipe: stack.enter_context(contextlib.closing(WarmRecipe(recipe))))


@pytest.fixture
def full_disk() -> Iterator[int]:
    """No file of this process may grow beyond so many bytes; a write beyond fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = 50_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
