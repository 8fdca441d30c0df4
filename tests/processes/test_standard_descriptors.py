"""Processes whose standard descriptors are closed, as by ``cmd <&- >&- 2>&-`` over ssh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import script_environment

pytestmark = pytest.mark.timeout(120)

PRINTING = """
import contextlib, os

def shout():
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # nobody has it open
            os.write(fd, b"from C")
    print("from Python", flush=True)
    return True

shout()  # on being imported, as some engines do
"""
TALKS = """
import json, os, sys
from pathlib import Path
from torchrl_hts._processes.fork_server import WorkerServer
from torchrl_hts._processes.messages import receive_object, send_object
from torchrl_hts._rounds.shared_memory import SharedMemory
from torchrl_hts.errors import WorkerId

if "filled" in sys.argv:  # by the user, as Python opens files: for this process alone
    sys.stdin, sys.stdout, sys.stderr = (open(os.devnull, "w") for _ in range(3))
block = SharedMemory.create_fd()
server = WorkerServer(["printing"])
workers = [server.spawn(WorkerId("executor", i), "worker_targets:serve", ()) for i in range(2)]
from printing import shout
shout()
known = []
for worker in workers:
    send_object(worker.control, ("call", shout))
    receive_object(worker.control)
    send_object(worker.control, ("call", os.getpid))
    known += [receive_object(worker.control) == worker.pid, worker.stderr()]
server.close()
Path(sys.argv[1]).write_text(json.dumps([*known, os.fstat(block).st_size]))
"""


@pytest.mark.parametrize("filled", [False, True], ids=["left", "filled"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_workers_are_talked_to_over_no_standard_descriptor(
    closed: str, filled: bool, tmp_path: Path
) -> None:
    """What is printed, by whomever, is read by no worker, and lies in no block of memory."""
    (tmp_path / "printing.py").write_text(PRINTING)
    told = tmp_path / "told"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", TALKS, str(told)]
    command += ["filled"] * filled
    environment = script_environment()
    environment["PYTHONPATH"] += f":{tmp_path}"
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(told.read_text()) == [True, "from C", True, "from C", 0]
