"""The process that forks workers on request, and the start of each worker.

Runs as ``python -c "from torchrl_hts._processes.fork_server_main import serve; serve(...)"``;
`fork_server.py` is the main process's side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

from torchrl_hts._processes.linux import (
    die_with_parent,
    keep_blocks_of_workers,
    name_process,
    wake_on_time,
    watch_end,
)
from torchrl_hts._processes.messages import (
    read_fds,
    read_message,
    receive_object,
    send_message,
    send_object,
)
from torchrl_hts._processes.process_groups import end_group
from torchrl_hts._processes.raised import Raised
from torchrl_hts._processes.standard_descriptors import fill_standard_descriptors
from torchrl_hts._processes.stderr import WorkerOutput

__all__ = ["serve"]


def serve(fd: int, main_pid: int) -> None:
    """Main loop of a server: requests come in, workers go out, exits are reported."""
    fill_standard_descriptors()  # those that the main process has opened may not be inherited
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _do_nothing)
    keep_blocks_of_workers()
    name_process("worker server")
    started_with = frozenset(os.environ)
    requests = socket.socket(fileno=fd)
    requests.set_inheritable(False)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    main_fd = watch_end(main_pid)
    if main_fd is not None:
        poll.register(main_fd, select.POLLIN)
    workers: dict[int, WorkerOutput] = {}
    outputs: dict[int, WorkerOutput] = {}  # by descriptor; one may outlive its worker in a fork
    try:
        while True:
            ready = {fd for fd, _ in poll.poll()}
            for ready_fd in ready & outputs.keys():
                if not outputs[ready_fd].pump():
                    poll.unregister(ready_fd)
                    outputs.pop(ready_fd).close()
            if main_fd in ready:
                return
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                _report_exits(requests, workers)
            if requests.fileno() in ready:
                request = read_message(requests)
                if request is None or "close" in request:
                    return
                if "preload" in request:
                    with _ending_with_main(requests, main_fd, workers):
                        _preload(request["preload"])
                elif "stderr_of" in request:
                    said = _last_lines(workers.get(request["stderr_of"]))
                    send_message(requests, {"id": request["id"], "stderr": said})
                else:
                    ours = [requests.fileno(), wake_read, wake_write, *outputs]
                    ours += [] if main_fd is None else [main_fd]
                    if (spawned := _spawn(requests, request, ours, started_with)) is not None:
                        pid, output = spawned
                        workers[pid] = outputs[output.fd] = output
                        poll.register(output.fd, select.POLLIN)
                        send_message(requests, {"id": request["id"], "pid": pid})
    except (BrokenPipeError, ConnectionResetError):
        return  # the main process is gone
    finally:
        _end_with(workers)


def _spawn(
    requests: socket.socket, request: dict[str, Any], ours: list[int], started_with: frozenset[str]
) -> tuple[int, WorkerOutput] | None:
    """Fork the worker that a request asks for; None, once that is told, if the system refuses."""
    fds: list[int] = []
    try:
        fds = read_fds(requests, request["fds"])
        output = WorkerOutput()
        return _fork(request, fds, output, ours, started_with), output
    except OSError as error:  # of descriptors or of processes there are too few
        refusal = {"refused": error.errno, "why": str(error)}
        send_message(requests, {"id": request["id"], **refusal})
        return None
    finally:
        for worker_fd in fds:
            os.close(worker_fd)


def _end_with(workers: Iterable[int]) -> NoReturn:
    """End all workers, then this process."""
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in workers:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        end_group(pid)
    os._exit(0)  # unloading torch would take a second, and there is nothing to save


@contextlib.contextmanager
def _ending_with_main(
    requests: socket.socket, main_fd: int | None, workers: Iterable[int]
) -> Iterator[None]:
    """Let this process end at once if the main process does, while it imports for seconds.

    By a thread, which is gone before the next fork.
    """
    done_read, done_write = os.pipe()
    poll = select.poll()
    poll.register(done_read, select.POLLIN)
    poll.register(requests.fileno(), 0)  # its other end is closed; what comes in has time
    if main_fd is not None:
        poll.register(main_fd, select.POLLIN)

    def watch() -> None:
        ended = {fd for fd, _ in poll.poll()}
        if done_read not in ended:
            _end_with(workers)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(done_write, b"x")  # not by closing it: a module may have forked
        thread.join()
        os.close(done_write)
        os.close(done_read)


def _fork(
    request: dict[str, Any],
    fds: list[int],
    output: WorkerOutput,
    server_fds: list[int],
    started_with: Collection[str],
) -> int:
    """Fork a worker, whose stderr is ``output``; returns its process id."""
    server_pid = os.getpid()
    gc.freeze()  # collections in workers leave the shared pages alone
    try:
        pid = os.fork()
    except OSError:
        os.close(output.fd)
        os.close(output.write_fd)
        raise
    if pid == 0:
        os.setpgid(0, 0)  # a group of its own, with all that its environments will start
        die_with_parent(server_pid)
        name_process(request["name"])
        _run_worker(request["spawn"], fds, output, [*server_fds, output.fd], started_with)
    os.close(output.write_fd)
    return pid


def _last_lines(output: WorkerOutput | None) -> str:
    if output is None:
        return ""
    output.pump()
    return output.tail()


def _run_worker(
    target: str,
    fds: list[int],
    output: WorkerOutput,
    server_fds: list[int],
    started_with: Collection[str],
) -> None:
    """Run a target in a freshly forked worker; never returns."""
    code = 1
    try:
        os.dup2(output.write_fd, 2)
        os.close(output.write_fd)
        faulthandler.enable(file=2)  # an engine that crashes leaves a traceback on stderr
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Ignored, it would be so in what environments start, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in server_fds:
            os.close(fd)
        wake_on_time()
        control = Connection(fds[0])
        module, _, function = target.partition(":")
        try:
            run = getattr(importlib.import_module(module), function)
            # What it inherits comes first: all that is unpickled later may depend on it.
            for part in receive_object(control):
                part.take_over(started_with)
            run(control, fds[1:])
            code = 0
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = 0  # the main process has closed its side
        except BaseException as error:
            try:
                send_object(control, Raised.of(error))
            except OSError:  # nobody listens any more, as where closing fails at the end
                traceback.print_exception(error)
        control.close()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException:  # the worker that needs it meets the same error and reports it
            continue


def _report_exits(requests: socket.socket, workers: dict[int, WorkerOutput]) -> None:
    while workers:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        end_group(pid)
        code = os.waitstatus_to_exitcode(status)
        stderr = _last_lines(workers.pop(pid, None))
        send_message(requests, {"exited": pid, "status": code, "stderr": stderr})


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Handle SIGCHLD: the wake-up descriptor does the work."""
