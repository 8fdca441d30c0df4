"""What is Linux's own is asked for in one place, which can be told to do without it."""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import BLOCKS, open_descriptors

from torchrl_hts._processes.linux import ON_LINUX, keep_large_blocks
from torchrl_hts._rounds.shared_memory import Layout, SharedMemory

PACKAGE = Path(__file__).parents[2] / "torchrl_hts"

LINUX_ONLY = {"memfd_create", "pidfd_open", "prctl", "sched_getaffinity", "eventfd", "signalfd"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_one_module_knows_linux(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if path.name == "linux.py":
            continue
        if isinstance(node, ast.Attribute):
            assert node.attr not in LINUX_ONLY, ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Path", "open", "os.listdir"):
            assert "/proc" not in ast.unparse(node), ast.unparse(node)


def test_the_switch_turns_all_of_it_off() -> None:
    code = (
        "import os, sys\n"
        "from torchrl_hts._processes import linux\n"
        "from torchrl_hts._processes.limits import available_cores, available_memory\n"
        "from torchrl_hts._rounds.shared_memory import SharedMemory\n"
        "assert not linux.ON_LINUX\n"
        "assert linux.watch_end(os.getpid()) is None\n"
        "assert available_memory() is None\n"
        "assert available_cores() == os.cpu_count()\n"
        "fd = SharedMemory.create_fd()\n"
        "assert 'memfd' not in os.readlink(f'/proc/self/fd/{fd}')\n"
        "assert os.fstat(fd).st_nlink == 0\n"
        "linux.wake_on_time()\n"
        "print(open('/proc/self/timerslack_ns').read())\n"
    )
    environment = {**os.environ, "TORCHRL_HTS_POSIX_ONLY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1, "nothing was set"


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_block_that_is_kept_is_seen(where: str, tmp_path: Path) -> None:
    """By the checks of tests, `nothing_left` above all; also where memory is a file."""
    before = open_descriptors(*BLOCKS)
    fd = SharedMemory.create_fd(None if where == "memory" else str(tmp_path))
    kept = [SharedMemory(fd, Layout(1, 1, 0, 1, (), ()))]
    os.close(fd)
    assert len(open_descriptors(*BLOCKS) - before) == 1, "a mapping has a descriptor too"
    kept.clear()
    assert open_descriptors(*BLOCKS) == before


FAULTS = """
import resource, sys
import numpy as np
from torchrl_hts import keep_large_blocks
from torchrl_hts._processes.linux import ON_LINUX

kept = keep_large_blocks() if sys.argv[1] == "keep" else False
assert ON_LINUX or not kept

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

np.ones(1 << 21)  # 16 MiB
before = faults()
np.ones(1 << 21)
print(int(kept), faults() - before)
"""


def test_large_blocks_are_kept_where_the_system_can() -> None:
    def run(what: str) -> tuple[int, int]:
        command = [sys.executable, "-c", FAULTS, what]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        kept, faults = map(int, printed.split())
        return kept, faults

    _, without = run("give back")
    kept, faults = run("keep")
    assert without >= 8, "the system clears every page again, of 2 MiB at most"
    assert faults < 4 if kept else faults >= 8
    assert kept or not ON_LINUX or platform.libc_ver()[0] != "glibc"


@pytest.mark.parametrize("max_bytes", [0, -1, 1 << 31, 1e9])
def test_sizes_that_malloc_cannot_take_are_refused(max_bytes: Any) -> None:
    with pytest.raises(ValueError, match=f"an int from 1 to 2147483647, got {max_bytes}"):
        keep_large_blocks(max_bytes)


GIVEN_BACK = """
import numpy as np
from torchrl_hts._processes.linux import give_back_memory, keep_blocks_of_workers

def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) // 1024

keep_blocks_of_workers()
many = [np.ones(1 << 17) for _ in range(200)]  # of 1 MiB
last = np.ones(1 << 17)
del many
before = held()
give_back_memory()
print(before - held())
"""


@pytest.mark.skipif(
    not ON_LINUX or platform.libc_ver()[0] != "glibc", reason="other systems keep no memory"
)
def test_what_a_worker_needs_only_once_is_given_back() -> None:
    """Even where what it still needs lies at the end."""
    command = [sys.executable, "-c", GIVEN_BACK]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(printed) > 150
