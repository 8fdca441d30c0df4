"""Where everything lies: words for each unit of the schedule, rows for each environment."""

from __future__ import annotations

from torchrl_hts._rounds.shared_memory import Field, Layout, SharedMemory


def test_units_have_words_and_environments_rows() -> None:
    layout = Layout(6, 2, 1, 1, (Field(("x",), (), "int64"),), (), units=(3, 1, 2))
    memory = SharedMemory(SharedMemory.create_fd(), layout)
    assert memory.schedule(None).num_envs == len(memory.steps) == len(memory.phase) == 3
    assert memory.fields(1)["x",].shape == (6, 2)
    assert [layout.rows(unit) for unit in range(3)] == [range(3), range(3, 4), range(4, 6)]
    assert layout.envs([2, 0]) == (4, 5, 0, 1, 2)


def test_without_batches_both_are_the_same() -> None:
    layout = Layout(3, 2, 1, 1, (), ())
    assert layout.num_units == 3
    assert [layout.rows(unit) for unit in range(3)] == [range(1), range(1, 2), range(2, 3)]
