"""What the tests of several recipes share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from warm_recipes import WarmRecipe


@pytest.fixture(scope="module")
def warm_recipes() -> Iterator[Callable[[str], WarmRecipe]]:
    """Recipes that are cheap to start, by their names."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda recipe: stack.enter_context(contextlib.closing(WarmRecipe(recipe))))
