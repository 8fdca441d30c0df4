"""What the tests of several recipes share."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from small_sweeps import Sweeps
from warm_recipes import WarmRecipe


@pytest.fixture(scope="module")
def warm_recipes() -> Iterator[Callable[[str], WarmRecipe]]:
    """Recipes that are cheap to start, by their names."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda recipe: stack.enter_context(contextlib.closing(WarmRecipe(recipe))))


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweeps]:
    """A sweep whose trials are over at once."""
    for name in ("optuna", "rich", "matplotlib", "yaml"):
        pytest.importorskip(name)
    monkeypatch.setattr("support.sweep_trials.LOOK_EVERY_S", 0.01)
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield Sweeps(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def trained(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has kept its checkpoints after rounds 15, 19 and 23."""
    from replaying import train_a_walk  # which needs the packages of recipes

    return train_a_walk(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def changed(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(trained, tmp_path / "changed")
