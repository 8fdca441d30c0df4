"""Hosts on one machine: network namespaces, joined by an Ethernet switch that delays, loses, cuts.

Each host has its own name, addresses, ports and loopback, and the machine's files. Nothing of it
has a name outside: namespaces end with the processes that live in them. Takes root, Debian's
iproute2 and util-linux, and /dev/net/tun. The switch is a process of its own, since kernels may
lack netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["Hosts", "why_not"]

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 65_536
_JUMBO = 9_000  # bytes in a packet: fewer of them are fewer turns of a switch that Python runs


def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces take root, on Linux"
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun can't be opened"
    tried = subprocess.run(["unshare", "-n", "-u", "-m", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


class Hosts:
    """So many hosts, while a ``with`` block runs. Host i, from 0 on, has the address of `address`.

    Args:
        count: of hosts, up to 250.
        delay_s: that a packet takes from one to another, in seconds.
        loss: the share of packets that get lost, from 0 to 1.
    """

    def __init__(self, count: int, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        self._count, self._delay_s, self._loss = count, delay_s, loss
        self._holders: list[subprocess.Popen[str]] = []
        self._switch: subprocess.Popen[str] | None = None

    @staticmethod
    def address(host: int) -> str:
        """The IPv4 address of a host."""
        return f"10.78.0.{host + 1}"

    def __enter__(self) -> Hosts:
        self._directory = tempfile.TemporaryDirectory()
        names = Path(self._directory.name, "hosts")
        lines = [f"{self.address(host)} host{host}" for host in range(self._count)]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        try:
            for host in range(self._count):
                script = (
                    f"hostname host{host} && mount --bind {names} /etc/hosts && echo && exec cat"
                )
                held = ["unshare", "-n", "-u", "-m", "sh", "-c", script]
                self._holders.append(_speaking(held))
            pids = [str(holder.pid) for holder in self._holders]
            given = [str(self._delay_s), str(self._loss), *pids]
            self._switch = _speaking([sys.executable, __file__, *given])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in (*self._holders, *([self._switch] if self._switch else [])):
            process.communicate("")  # they end with their standard input
        self._holders.clear()
        self._directory.cleanup()

    def on(self, host: int, command: list[str]) -> list[str]:
        """A command line that runs another one on a host."""
        return ["nsenter", "-t", str(self._holders[host].pid), "-n", "-u", "-m", "--", *command]

    def torchrun(
        self, host: int, learners: int, *options: str, fewest: int | None = None
    ) -> list[str]:
        """A command line that has torchrun start learners on one of all hosts.

        Args:
            host: on which.
            learners: how many there.
            options: of torchrun, and the script with its own.
            fewest: hosts with which the run goes on; None: all.
        """
        # Without the second a host that comes later waits for an address in vain (torch 2.13).
        variables = ["GLOO_SOCKET_IFNAME=eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
        command = ["env", *variables, sys.executable, "-m", "torch.distributed.run"]
        command += [
            "--nnodes",
            f"{fewest or self._count}:{self._count}",
            "--nproc-per-node",
            str(learners),
        ]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address(0)}:29400"]
        command += ["--rdzv-id", "run", "--rdzv-conf", f"is_host={str(host == 0).lower()}"]
        return self.on(host, [*command, "--local-addr", self.address(host), *options])

    def cut(self, host: int) -> None:
        """Nothing goes to or from a host any more."""
        assert self._switch is not None
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(f"{host}\n")
        self._switch.stdin.flush()
        self._switch.stdout.readline()

    def crash(self, host: int) -> None:
        """End all processes of a host at once, as by SIGKILL; it can be used again."""
        holder = self._holders[host].pid
        where = os.readlink(f"/proc/{holder}/ns/net")
        while True:
            found = []
            for path in Path("/proc").glob("[0-9]*/ns/net"):
                with suppress(OSError):  # it has ended
                    if os.readlink(path) == where and _runs(path.parents[1]):
                        found.append(int(path.parents[1].name))
            found.remove(holder)
            if not found:
                return
            for pid in found:  # and then once more: they may have forked
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _runs(process: Path) -> bool:
    """Whether a process of /proc has not ended."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")


def _speaking(command: list[str]) -> subprocess.Popen[str]:
    """A process that has said that it is ready, and ends when its standard input does."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C is for whoever has made the hosts
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"{command} failed: {process.communicate()[1].strip()}")
    return process


# The switch, in a process of its own.


def _switch(delay_s: float, loss: float, holders: list[int]) -> None:
    taps = [_tap(holder, host) for host, holder in enumerate(holders)]
    print(flush=True)
    lost = random.Random(0)
    cut: set[int] = set()
    known: dict[bytes, int] = {}  # which tap an Ethernet address is at
    queue: list[tuple[float, int, int, bytes]] = []
    number = 0
    poll = select.poll()
    for ready in (0, *taps):
        poll.register(ready, select.POLLIN | select.POLLHUP)
    while True:
        wait_ms = max(0.0, queue[0][0] - time.monotonic()) * 1e3 if queue else None
        for fd, _ in poll.poll(wait_ms):
            if fd == 0:
                host = sys.stdin.readline()
                if not host:
                    return
                cut.add(taps[int(host)])
                print(flush=True)
                continue
            frame = os.read(fd, _FRAME)
            known[frame[6:12]] = fd
            to = known.get(frame[:6])
            if fd in cut or lost.random() < loss:
                continue
            for tap in [to] if to is not None else [tap for tap in taps if tap != fd]:
                number += 1
                heapq.heappush(queue, (time.monotonic() + delay_s, number, tap, frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, tap, frame = heapq.heappop(queue)
            if tap not in cut:
                os.write(tap, frame)


def _tap(holder: int, host: int) -> int:
    """Gives a host an interface eth0; returns the other end of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
    if libc.setns(there, 0):
        raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    for given in (
        f"addr add {Hosts.address(host)}/24 dev eth0",
        f"link set eth0 mtu {_JUMBO} up",
        "link set lo up",
    ):
        subprocess.run(["ip", *given.split()], check=True)
    libc.setns(here, 0)
    os.close(here)
    os.close(there)
    return tap


if __name__ == "__main__":
    _switch(float(sys.argv[1]), float(sys.argv[2]), list(map(int, sys.argv[3:])))
