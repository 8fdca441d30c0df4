"""Random generators of a process while environments play in its threads (test_in_thread.py too)."""

from __future__ import annotations

import random

import pytest
from probe import set_patience

from torchrl_hts._executor.generators import Generators, threads


def test_steps_beside_threads_count_as_steps_without_a_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which steps these are is a matter of timing."""
    set_patience(monkeypatch, 10)
    drawn = []
    for playing in ((), range(3), range(2, 9)):
        one = Generators(0, 1)
        for step in range(12):
            if step in playing:
                threads.begin()
            one.enter_step()
            if step in playing:
                threads.end()
        drawn.append(random.random())
    assert drawn == drawn[:1] * 3
