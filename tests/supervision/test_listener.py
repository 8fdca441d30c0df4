"""The listener: who is listened to, whatever numbers the system gives to descriptors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from torchrl_hts import WorkerError
from torchrl_hts._processes.fork_server import WorkerServer
from torchrl_hts._processes.worker_process import WorkerProcess
from torchrl_hts._rounds.exchange import Inbox
from torchrl_hts._supervision.failures import Site
from torchrl_hts._supervision.listener import Listener
from torchrl_hts.errors import WorkerId

pytestmark = pytest.mark.timeout(60)


class Places:
    """What a listener asks where a worker is."""

    def site(self, worker: WorkerProcess) -> Site:
        return Site()


@pytest.fixture
def server() -> Iterator[WorkerServer]:
    server = WorkerServer(("worker_targets",))
    yield server
    server.close()


def test_a_worker_that_has_the_descriptors_of_one_before_it(server: WorkerServer) -> None:
    """Two die at once: the second is dismissed again when the first has been replaced."""
    places, inbox = Places(), Inbox.create()
    listener = Listener(inbox.read_fd, {}, places.site)
    lost = server.spawn(WorkerId("executor", 1), "worker_targets:serve", ())
    listener.add(lost)
    listener.dismiss(lost)
    new = server.spawn(WorkerId("executor", 2), "worker_targets:serve", ())
    assert set(new.fds) & set(lost.fds), "the system gives the lowest numbers that are free"
    listener.add(new)
    listener.dismiss(lost)
    os.kill(new.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"executor 2 .*was killed by SIGKILL"):
        next(listener.messages(dict))
    listener.dismiss(new)
    inbox.close()
