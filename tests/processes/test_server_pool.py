"""Servers that several users share: the last one ends it, a dead one is replaced."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from probe import process_of, shared_servers_locked
from processes import (
    Script,
    alive,
    wait_until,
)

from torchrl_hts._processes.server_pool import (
    ServerUser,
    acquire_server,
    keep_servers,
    release_servers,
)
from torchrl_hts._processes.shutdown_once import endings_wait
from torchrl_hts.errors import WorkerId

pytestmark = pytest.mark.timeout(120)


class TestPool:
    """Servers that collectors share."""

    def test_the_last_user_ends_it(self) -> None:
        preload = ("numpy",)
        one, two = ServerUser(), ServerUser()
        server = acquire_server(preload, one)
        assert acquire_server(preload, two) is server
        with keep_servers(preload):
            release_servers(one)
            release_servers(one)
            release_servers(two)
            assert alive(server.pid)
        assert not alive(server.pid)
        other = acquire_server(preload, one)
        assert other is not server
        release_servers(one)
        assert not alive(other.pid)

    def test_one_that_is_kept_to_the_end_ends_without_a_word(self, tmp_path: Path) -> None:
        source = """
            import collections, os
            from torchrl_hts import keep_servers

            kept = keep_servers(("numpy",))
            kept.__enter__()
            collections.kept = kept  # until modules have lost their names
            del kept
        """
        with Script(tmp_path / "script.py", textwrap.dedent(source)) as script:
            assert script.wait() == (0, "")

    @pytest.mark.parametrize("preload", ["numpy", 3, None, [1], ("numpy", 3)])
    def test_what_names_no_modules_is_refused(self, preload: Any) -> None:
        with pytest.raises(TypeError, match="takes tuples of names"), keep_servers(preload):
            pass

    def test_a_dead_server_is_replaced_and_its_users_are_told(self) -> None:
        preload = ("numpy",)
        one, two, three = (ServerUser() for _ in range(3))
        server = acquire_server(preload, one)
        assert acquire_server(preload, two) is server
        worker = server.spawn(WorkerId("executor", 0), "worker_targets:serve", ())
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: process_of(server).poll() is not None)
        other = acquire_server(preload, three)
        assert other is not server
        release_servers(one)
        assert worker.exit_status(20) == -signal.SIGKILL
        release_servers(two)
        assert alive(other.pid)
        release_servers(three)
        assert not alive(other.pid)

    def test_one_whose_users_are_gone_without_a_word_ends_with_the_next(self) -> None:
        server = acquire_server(("numpy",), ServerUser())
        user = ServerUser()
        acquire_server(("numpy", "json"), user)
        assert alive(server.pid)
        release_servers(user)
        assert not alive(server.pid)

    def test_a_keeper_may_be_collected_while_a_server_is_acquired(self) -> None:
        """As by the garbage collector, in the thread that holds the lock."""

        def keeper() -> Iterator[None]:
            with keep_servers(("numpy",)):
                yield

        user = ServerUser()
        server = acquire_server(("numpy",), user)
        keeping = keeper()
        next(keeping)
        release_servers(user)

        @endings_wait
        def acquire() -> None:
            with shared_servers_locked():
                keeping.close()

        acquire()
        assert not alive(server.pid)
