"""What there is of workers before one has been started, and after the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import COLLECTORS_OWN, open_descriptors

from torchrl_hts._processes.server_pool import Servers
from torchrl_hts._supervision.supervisor import Supervisor
from torchrl_hts._supervision.workers import EnvironmentSource, Stage, Workers
from torchrl_hts.errors import WorkerId


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(EnvironmentSource((b"",) * 5, {}, seed=0), 2, 1, Servers())
    yield workers
    workers.shutdown()


def test_environments_lie_in_blocks_of_neighbours(workers: Workers) -> None:
    assert workers.owner == (0, 0, 0, 1, 1)
    assert workers.environments(WorkerId("executor", 1)) == (3, 4)
    assert workers.environments(WorkerId("actor", 1)) == ()


def test_what_comes_later_is_not_there_yet(workers: Workers) -> None:
    assert workers.stage is Stage.MAKING
    with pytest.raises(RuntimeError, match=r"has not been laid out: call share\(\)"):
        _ = workers.shared
    with pytest.raises(RuntimeError, match=r"has not been laid out: call share\(\)"):
        Supervisor(workers)


def test_after_a_shutdown_nothing_is_open_and_time_stands_still() -> None:
    before = open_descriptors(*COLLECTORS_OWN)
    workers = Workers(EnvironmentSource((b"",), {}, seed=0), 1, 1, Servers())
    assert len(open_descriptors(*COLLECTORS_OWN) - before) > 0
    workers.shutdown()
    workers.shutdown()
    assert workers.stage is Stage.CLOSED
    assert workers.is_closed()
    assert workers.clock_s() == workers.clock_s()
    assert open_descriptors(*COLLECTORS_OWN) == before
