"""Worker servers: workers start, are watched, and never stay behind (I8)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import (
    Script,
    alive,
    needs_linux,
    open_descriptors,
    processes_below,
    wait_until,
    wait_until_gone,
)
from worker_targets import faults_of_a_block, modules, timer_slack_ns

import torchrl_hts._processes.fork_server
from torchrl_hts._processes.fork_server import ServerEndedError, WorkerServer
from torchrl_hts._processes.linux import ON_LINUX
from torchrl_hts._processes.messages import receive_object, send_object
from torchrl_hts._processes.raised import Raised
from torchrl_hts._processes.server_pool import (
    TORCH_FREE,
)
from torchrl_hts._processes.worker_process import WorkerProcess
from torchrl_hts.errors import Failure, ResourceError, WorkerId

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def server() -> Iterator[WorkerServer]:
    server = WorkerServer(("worker_targets",))
    yield server
    server.close()


def spawn(server: WorkerServer, fds: tuple[int, ...] = ()) -> WorkerProcess:
    return server.spawn(WorkerId("executor", 0), "worker_targets:serve", fds)


def ask(worker: WorkerProcess, order: str, argument: Any = None) -> Any:
    send_object(worker.control, (order, argument))
    return receive_object(worker.control) if order == "call" else None


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().rstrip()


class TestServer:
    """One server and its workers."""

    def test_workers_answer_and_end_with_their_connection(self, server: WorkerServer) -> None:
        workers = [spawn(server) for _ in range(3)]
        assert [ask(worker, "call", os.getpid) for worker in workers] == [w.pid for w in workers]
        assert [ask(worker, "call", os.getppid) for worker in workers] == [server.pid] * 3
        assert workers[0].exit_status(0) is None
        workers[0].hang_up()
        assert workers[0].exit_status(20) == 0
        assert ask(workers[1], "call", os.getpid) == workers[1].pid
        for worker in workers[1:]:
            worker.hang_up()
            worker.hang_up()
            assert worker.exit_status(20) == 0

    @pytest.mark.parametrize("status", [0, 7])
    def test_exit_codes(self, server: WorkerServer, status: int) -> None:
        worker = spawn(server)
        assert not worker.has_ended()
        ask(worker, "exit", status)
        assert worker.exit_status(20) == status == worker.exit_status(0)
        assert worker.has_ended() == ON_LINUX  # elsewhere its connection tells
        with pytest.raises((EOFError, ConnectionResetError)):
            receive_object(worker.control)

    def test_kill(self, server: WorkerServer) -> None:
        worker = spawn(server)
        ask(worker, "hang")
        assert worker.exit_status(0) is None
        worker.kill()
        assert worker.exit_status(20) == -signal.SIGKILL
        worker.kill()  # once more does nothing, even if another process has the number by then

    def test_an_exception_comes_back_with_its_traceback(self, server: WorkerServer) -> None:
        worker = spawn(server)
        ask(worker, "raise", "what now?")
        told: Raised = receive_object(worker.control)
        assert told.failure is Failure.RAISED
        assert told.traceback.startswith("Traceback")
        assert told.traceback.endswith("ValueError: what now?\n")
        assert worker.exit_status(20) == 1

    @pytest.mark.parametrize("target", ["nowhere:serve", "worker_targets:nothing"])
    def test_a_target_that_is_not_there(self, server: WorkerServer, target: str) -> None:
        worker = server.spawn(WorkerId("executor", 0), target, ())
        told: Raised = receive_object(worker.control)
        assert "Error: " in told.traceback
        assert worker.exit_status(20) == 1

    def test_file_descriptors_arrive_in_order(self, server: WorkerServer) -> None:
        """More of them than fit into one message."""
        pipes = [os.pipe() for _ in range(150)]
        worker = spawn(server, tuple(write for _, write in pipes))
        for _, write in pipes:
            os.close(write)
        for index in (149, 0, 128, 127):
            ask(worker, "write", index)
            assert os.read(pipes[index][0], 2) == b"x"
        worker.hang_up()
        assert worker.exit_status(20) == 0
        for read, _ in pipes:  # nobody else has kept the other end open
            assert os.read(read, 1) == b""
            os.close(read)

    def test_preloaded_modules_are_shared(self, server: WorkerServer) -> None:
        first = spawn(server)
        assert "worker_targets" in ask(first, "call", modules)
        assert "wave" not in ask(first, "call", modules)
        server.preload(["wave", "no_such_module"])
        assert "wave" in ask(spawn(server), "call", modules)

    @pytest.mark.parametrize(
        ("patched", "number", "remedy"),
        [
            ("subprocess.Popen", errno.EAGAIN, "Allow more processes"),
            ("socket.socketpair", errno.EMFILE, "Allow more open files"),
        ],
    )
    def test_a_refused_server_is_one_clear_error(
        self, patched: str, number: int, remedy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        before = open_descriptors("socket")
        monkeypatch.setattr(f"torchrl_hts._processes.fork_server.{patched}", refuse)
        with pytest.raises(ResourceError, match=f"^a server of workers could not be .*{remedy}"):
            WorkerServer(("worker_targets",))
        assert open_descriptors("socket") == before

    @pytest.mark.parametrize("chosen", [None, "7"])
    def test_strings_hash_alike_in_all_servers(
        self, chosen: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So sets of them have one order in every run; what the user has chosen stays."""
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if chosen is not None:
            monkeypatch.setenv("PYTHONHASHSEED", chosen)
        command = [sys.executable, "-c", "print(hash('ball'))"]
        variables = {**os.environ, "PYTHONHASHSEED": chosen or "0"}
        expected = int(subprocess.run(command, env=variables, capture_output=True).stdout)
        for _ in range(2):
            server = WorkerServer(("worker_targets",))
            try:
                assert ask(spawn(server), "call", partial(hash, "ball")) == expected
            finally:
                server.close()

    @needs_linux
    @pytest.mark.parametrize(
        ("worker_id", "name"),
        [
            (WorkerId("executor", 3), "executor 3"),
            (WorkerId("trial of the policy"), "trial of the po"),
        ],
    )
    def test_ps_shows_who_is_who(
        self, server: WorkerServer, worker_id: WorkerId, name: str
    ) -> None:
        worker = server.spawn(worker_id, "worker_targets:serve", ())
        assert name_of(ask(worker, "call", os.getpid)) == name
        assert name_of(server.pid) == "worker server"

    @needs_linux
    def test_sleeps_end_on_time(self, server: WorkerServer) -> None:
        assert ask(spawn(server), "call", timer_slack_ns) == 1

    @needs_linux
    def test_blocks_of_a_forward_pass_are_kept_and_larger_ones_are_not(
        self, server: WorkerServer
    ) -> None:
        worker = spawn(server)
        # 12 would be one for each 2 MiB, the largest page there is; a few come of having forked.
        assert ask(worker, "call", partial(faults_of_a_block, 24 << 20)) < 10
        assert ask(worker, "call", partial(faults_of_a_block, 300 << 20)) > 100

    def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(
        self, server: WorkerServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C while a worker is started: it ends by itself."""

        def interrupt(fd: int, timeout_s: float) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(torchrl_hts._processes.fork_server, "readable", interrupt)
            with pytest.raises(KeyboardInterrupt):
                spawn(server)
        worker = spawn(server)
        assert ask(worker, "call", os.getpid) == worker.pid
        wait_until(lambda: processes_below(server.pid) == {worker.pid})

    def test_a_server_that_is_interrupted_within_a_message_is_given_up(
        self, server: WorkerServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*arguments: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(torchrl_hts._processes.fork_server, "read_message", interrupt)
            with pytest.raises(KeyboardInterrupt):
                spawn(server)
        wait_until(server.has_ended)
        with pytest.raises(ServerEndedError, match="worker server"):
            spawn(server)

    def test_a_module_that_forks_while_it_is_imported(self, tmp_path: Path) -> None:
        (tmp_path / "forks.py").write_text(
            "import os, pathlib, signal\n"
            "child = os.fork()\n"
            "if child == 0:\n    signal.pause()\n"
            f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child))\n"
        )
        sys.path.append(str(tmp_path))
        try:
            server = WorkerServer(["worker_targets", "forks"])
            worker = spawn(server)
            assert ask(worker, "call", os.getpid) == worker.pid
            server.close()
        finally:
            sys.path.remove(str(tmp_path))
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)

    def test_many_threads_use_one_server(self, server: WorkerServer) -> None:
        found: list[bool] = []

        def use() -> None:
            worker = spawn(server)
            found.append(ask(worker, "call", os.getpid) == worker.pid)
            ask(worker, "exit", 3)
            found.append(worker.exit_status(20) == 3)

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 16

    def test_waiting_for_one_worker_does_not_keep_others_waiting(
        self, server: WorkerServer
    ) -> None:
        hanging, other = spawn(server), spawn(server)
        ask(hanging, "hang")
        waiting = threading.Thread(target=hanging.exit_status, args=(60,))
        waiting.start()
        ask(other, "exit", 0)
        assert other.exit_status(20) == 0
        assert waiting.is_alive()
        hanging.kill()
        waiting.join()


class TestTheEnd:
    """Whoever ends, and however: nobody stays behind."""

    def test_close_ends_idle_and_hanging_workers(self) -> None:
        server = WorkerServer(TORCH_FREE)
        workers = [spawn(server) for _ in range(3)]
        ask(workers[1], "hang")
        server.close()
        server.close()
        wait_until_gone([server.pid, *(worker.pid for worker in workers)])
        with pytest.raises(
            RuntimeError, match=r"worker server \(pid \d+\) ended \(exit status 0\)"
        ):
            spawn(server)

    @needs_linux
    def test_a_server_that_is_killed_takes_its_workers_along(self) -> None:
        server = WorkerServer(TORCH_FREE)
        workers = [spawn(server) for _ in range(2)]
        ask(workers[0], "hang")
        os.kill(server.pid, signal.SIGKILL)
        for worker in workers:
            assert worker.exit_status(20) == -signal.SIGKILL
        assert f"pid {server.pid}) ended (exit status -9)" in str(workers[0].server_failure)
        wait_until_gone(worker.pid for worker in workers)
        with pytest.raises(RuntimeError, match=r"ended \(exit status -9\)"):
            spawn(server)
        server.close()

    def test_a_fork_of_the_main_process_changes_nothing(self) -> None:
        """It neither keeps workers alive nor ends them, and goes on when they end."""
        server = WorkerServer(TORCH_FREE)
        worker = spawn(server)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                server.close()  # not its own: the copy alone is closed
                os.close(write)
                os.read(read, 1)  # until the test is over
            finally:
                os._exit(0)
        assert ask(worker, "call", os.getpid) == worker.pid
        worker.hang_up()
        assert worker.exit_status(20) == 0
        hanging = spawn(server)
        server.close()
        wait_until_gone([server.pid, hanging.pid])
        assert alive(child)
        os.close(write)
        os.close(read)
        assert os.waitpid(child, 0) == (child, 0)

    @needs_linux
    def test_nothing_survives_a_main_process_that_is_killed(self, tmp_path: Path) -> None:
        """Not even beside a fork of it that lives on and holds its descriptors; without torch."""
        script = tmp_path / "main.py"
        script.write_text(
            "import json, os, signal\n"
            "from torchrl_hts._processes.messages import send_object\n"
            "from torchrl_hts._processes.server_pool import TORCH_FREE\n"
            "from torchrl_hts._processes.fork_server import WorkerServer\n"
            "from torchrl_hts.errors import WorkerId\n"
            "server = WorkerServer(TORCH_FREE)\n"
            "who = WorkerId('executor', 0)\n"
            "workers = [server.spawn(who, 'worker_targets:serve', ()) for _ in range(2)]\n"
            "send_object(workers[0].control, ('hang', None))\n"
            "fork = os.fork()\n"
            "if fork == 0:\n"
            "    signal.pause()\n"
            "print(json.dumps([fork, server.pid, *(w.pid for w in workers)]), flush=True)\n"
            "signal.pause()\n"
        )
        with Script(script, script.read_text()) as main:
            fork, *pids = main.receive()
            try:
                assert all(map(alive, pids))
                os.kill(main.process.pid, signal.SIGKILL)
                wait_until_gone(pids)
                assert alive(fork)
            finally:
                os.kill(fork, signal.SIGKILL)

    @pytest.mark.parametrize("end", ["signal.pause()", "server.close(timeout_s=60)"])
    def test_a_server_that_imports_does_not_stay_either(self, tmp_path: Path, end: str) -> None:
        """Torch takes seconds to import; this module takes for ever."""
        reached = tmp_path / "reached"
        os.mkfifo(reached)
        (tmp_path / "endless.py").write_text(
            f"import signal\nopen({str(reached)!r}, 'w').close()\nsignal.pause()\n"
        )
        source = (
            f"import json, signal, sys\nsys.path.append({str(tmp_path)!r})\n"
            "from torchrl_hts._processes.fork_server import WorkerServer\n"
            "from probe import process_of\n"
            "server = WorkerServer(['endless'])\n"
            f"open({str(reached)!r}).read()\n"
            f"print(json.dumps(server.pid), flush=True)\n{end}\n"
            "print(json.dumps(process_of(server).returncode), flush=True)\n"
        )
        with Script(tmp_path / "main.py", source) as main:
            pid = main.receive()
            if "pause" in end:
                main.process.kill()
            else:
                assert main.receive() == 0, "it had to be killed"
            wait_until_gone([pid])
