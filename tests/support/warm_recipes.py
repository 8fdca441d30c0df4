"""Recipes in processes that are forked with everything imported: cheap to start, kill and resume.

A recipe that is started from nothing spends nine of ten seconds on importing torch, twice. Here its
process and its worker servers are forks. That nothing of it stays behind is shown elsewhere
(`test_collector_ends.py`): here the server that forked it sees to that.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from deeds import Deed
from processes import SHARED_SERVERS, wait_until
from script_paths import RECIPES

from torchrl_hts._processes.fork_server import WorkerServer
from torchrl_hts._processes.messages import receive_object, send_object
from torchrl_hts._processes.server_pool import WITH_TORCH
from torchrl_hts._processes.worker_process import WorkerProcess
from torchrl_hts.errors import WorkerId

RUN = subprocess.Popen


class WarmRecipe:
    """A recipe that is started often.

    Args:
        recipe: the name of its module, to import with all that it needs.
    """

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.server = WorkerServer((*WITH_TORCH, "warm_recipes", recipe))
        SHARED_SERVERS.add(self.server.pid)

    def start(self, flags: Sequence[str], output: Path, deed: Deed | None = None) -> WorkerProcess:
        """Start a run; what it prints goes into a file. It may do something to itself."""
        with output.open("w") as file:
            who = WorkerId("executor", 0)  # for what is said if it can't be started
            process = self.server.spawn(who, "warm_recipes:serve", [file.fileno()])
        send_object(process.control, (f"{self.recipe}.py", list(flags), deed))
        return process

    def close(self) -> None:
        """End what runs."""
        self.server.close()


def stop_run(
    warm_recipes: Callable[[str], WarmRecipe],
    arguments: str,
    directory: Path,
    number: int,
    said: str,
    written: str = "*",
) -> tuple[int | None, str]:
    """Send a run a signal once it has said and written something; its exit code, and what it said.

    Args:
        arguments: of the command line, the recipe's name first.
        directory: of the run.
        written: a pattern of files in the directory.
    """
    recipe, *flags = arguments.split()
    output = directory.with_name("output")
    warm = warm_recipes(recipe.removesuffix(".py"))
    process = warm.start([*flags, "--output-dir", str(directory)], output)

    def is_time() -> bool:
        return said in output.read_text() and any(directory.glob(written))

    wait_until(lambda: process.has_ended() or is_time(), timeout_s=200)
    if not process.has_ended():
        os.kill(process.pid, number)
    code = process.exit_status(100)
    process.hang_up()
    process.close()
    return code, output.read_text()


def stop_at(
    warm_recipes: Callable[[str], WarmRecipe], arguments: str, directory: Path, deed: Deed
) -> tuple[int | None, str]:
    """A run that stops itself by a signal; its exit code, and what it said."""
    recipe, *flags = arguments.split()
    output = directory.with_name("output")
    warm = warm_recipes(recipe.removesuffix(".py"))
    process = warm.start([*flags, "--output-dir", str(directory)], output, deed)
    code = process.exit_status(200)
    process.hang_up()
    process.close()
    return code, output.read_text()


class ForkedServer:
    """As much of `subprocess.Popen` as a worker server needs, of a fork of this process."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Collection[int], env: Mapping[str, str], **_: Any
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {
                    0,
                    1,
                    2,
                    *pass_fds,
                }:
                    try:
                        os.close(fd)
                    except OSError:  # that of the listing itself
                        continue
                os.environ.update(env)
                exec(command[-1], {})
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        """Its exit code; None if it runs on."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("server", timeout or 0)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def popen(command: Any, *args: Any, **kwargs: Any) -> Any:
    """`subprocess.Popen`, but for worker servers."""
    is_server = isinstance(command, list) and "fork_server_main" in command[-1]
    return (ForkedServer if is_server else RUN)(command, *args, **kwargs)


def serve(control: Connection, fds: list[int]) -> NoReturn:
    """Run a recipe as a script."""
    recipe, flags, deed = receive_object(control)
    for fd in (1, 2):
        os.dup2(fds[0], fd)
    os.close(fds[0])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subprocess.Popen = popen  # type: ignore[assignment, misc]
    sys.argv = [str(RECIPES / recipe), *flags]
    if deed is not None:
        deed.prepare()
    code: Any = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
