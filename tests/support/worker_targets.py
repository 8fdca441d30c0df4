"""What workers of test_workers.py do. Imports no torch."""

from __future__ import annotations

import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from torchrl_hts._processes.messages import receive_object, send_object


def serve(control: Connection, fds: list[int]) -> None:
    """Obey what comes, until the connection closes."""
    while True:
        order, argument = receive_object(control)
        if order == "call":
            send_object(control, argument())
        elif order == "write":
            os.write(fds[argument], b"x")
        elif order == "exit":
            os._exit(argument)
        elif order == "raise":
            raise ValueError(argument)
        elif order == "hang":
            signal.pause()


def modules() -> list[str]:
    """What this process has imported."""
    return list(sys.modules)


def timer_slack_ns() -> int:
    """How much later than asked for a sleep of this process may end."""
    return int(Path("/proc/self/timerslack_ns").read_text())


def faults_of_a_block(num_bytes: int) -> int:
    """How many pages the system clears for memory that this process has had, and freed."""
    b"x" * num_bytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * num_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
