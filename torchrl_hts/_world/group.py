"""The ranks at work: what `tree.py` and `protocol.py` ask for, over torch.distributed (gloo).

All waiting for other ranks is in `Group._exchange`. Every exchange has a number and a name, and
every rank counts alike. A rank that has waited for a while posts in the store of the process group
which exchange it has come to; nobody reads it, unless an exchange fails. Then who has posted
nothing, or another exchange, is to blame. So a healthy run never talks to the store.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_hts._world.digest import digest
from torchrl_hts._world.joining import over_the_network, what_failed
from torchrl_hts._world.order import Order
from torchrl_hts._world.tree import swaps
from torchrl_hts.errors import WorldError

__all__ = ["Group"]

_POST_EVERY_S = 1.0
_STORE_PATIENCE_S = 3.0  # a store behind a cut link doesn't answer
_END_TAG = 1
_TRIED_VALUES = 100_003  # of a sum that must come out the same twice
_TOLD = 256  # bytes of an exchange's name that others are told
_NO_TIME_OUT = timedelta(days=365)


class Group:
    """The ranks of a run, of which this process is one.

    To be made on every rank, and every method to be called on every rank in the same order. After a
    failure no method works any more.

    Args:
        timeout_s: how long another rank may keep this one waiting.
        order: names the exchanges.
        size: so many ranks of the process group, from rank 0 on; None: all. Others don't make it.

    Raises:
        WorldError: from every method, if a rank doesn't come, or has ended; the message names it.
            Also in a process that was forked from this one.
    """

    def __init__(self, timeout_s: float, order: Order, size: int | None = None) -> None:
        self.rank, self.size = dist.get_rank(), size or dist.get_world_size()
        self._timeout_s, self._order = timeout_s, order
        # Of its own: the user's exchanges, over whatever backend, keep their order.
        try:
            with over_the_network():
                self._group = dist.new_group(
                    [*range(self.size)],
                    backend="gloo",
                    timeout=timedelta(seconds=timeout_s),
                    use_local_synchronization=size is not None,
                )
        except dist.DistError as error:
            raise WorldError(
                f"rank {self.rank} of {self.size} can't reach the worlds of other ranks: every "
                f"rank must make one, the last within timeout_s={timeout_s:g} of the first, and "
                f"none may have ended ({what_failed(error)})"
            ) from error
        self._posts = _Posts(self._group.get_group_store(), self.rank, self.size, timeout_s)
        self._number = 0
        self._failure: str | None = None
        self._pid = os.getpid()
        self._closed = False
        self.gather(None)  # connects all to all, while it is known that all are there

    def tree_sum(self, vector: Tensor, what: str = "a sum") -> Tensor:
        """The sum of all ranks' vectors in the order of the tree, with the same bits on each.

        Args:
            vector: ``[n]`` on the CPU, of the same length on every rank; may be written to.
            what: what is summed, for messages.
        """
        with self._exchange(what, len(vector)) as exchange:
            tag = exchange.tag
            for peer, give, take, adds in swaps(self.rank, self.size, len(vector)):
                out, place = vector[slice(*give)], vector[slice(*take)]
                # Where the two are the same values, what comes must not overwrite what goes.
                into = torch.empty_like(place) if adds else place
                works = [
                    dist.isend(out, group=self._group, group_dst=peer, tag=tag),
                    dist.irecv(into, group=self._group, group_src=peer, tag=tag),
                ]
                for work in works:
                    assert work is not None
                    work.wait()
                if adds:
                    place += into
        return vector

    def all_reduce(self, vector: Tensor, what: str = "a sum") -> Tensor:
        """The sum of all ranks' vectors in the order that the backend takes; written in place.

        Unlike messages of `tree_sum` it has no tag. Where ranks may be at different exchanges they
        compare tags first: what is foreseen meets the same on other ranks, or waits in vain.
        """
        with self._exchange(what, len(vector)) as exchange:
            if not exchange.foreseen:
                self._compare(exchange, 0)
            dist.all_reduce(vector, group=self._group)
        return vector

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """The values of all ranks, which are pickled, in their order.

        Args:
            value: of this rank.
            what: it is for, the same on every rank.

        Raises:
            WorldError: on every rank, if it is for something else on one.
        """
        with self._exchange(what, 0) as exchange:
            pickled = pickle.dumps(value)
            said = self._gather_bytes(pickled, max(self._compare(exchange, len(pickled))))
            return [pickle.loads(each) for each in said]

    def _compare(self, exchange: _Exchange, length: int) -> list[int]:
        """What all ranks give as length, if they are at the same exchange.

        It comes first in whatever has no tag of its own, and has one size: gloo ends the process
        where sizes differ.
        """
        table = torch.empty(self.size, 2, dtype=torch.int64)
        dist.all_gather([*table], torch.tensor([exchange.tag, length]), group=self._group)
        tags, lengths = table.unbind(1)
        if (tags != exchange.tag).any():  # W1: so do all ranks find
            names = [each.rstrip().decode() for each in self._gather_bytes(exchange.told, _TOLD)]
            rank, other = next(x for x in enumerate(names) if tags[x[0]] != exchange.tag)
            raise _ElsewhereError(_disagreement(rank, other, exchange.name))
        return lengths.tolist()

    def _gather_bytes(self, own: bytes, length: int) -> list[bytes]:
        """What all ranks give, each filled up with blanks to the same length."""
        table = torch.empty(self.size, length, dtype=torch.uint8)
        given = torch.frombuffer(bytearray(own.ljust(length)), dtype=torch.uint8)
        dist.all_gather([*table], given, group=self._group)
        return [row.numpy().tobytes() for row in table]

    def check_sums(self) -> None:
        """Raise WorldError unless `all_reduce` has the same bits each time, and on every rank."""
        generator = torch.Generator().manual_seed(self.rank)
        vector = torch.randn(_TRIED_VALUES, generator=generator)
        found = {digest([self.all_reduce(vector.clone())]) for _ in range(3)}
        if len({text for texts in self.gather(sorted(found)) for text in texts}) > 1:
            raise WorldError(
                "the sum of the same values had different bits from one time to the next, or from "
                "rank to rank: use World(shards=...), which adds by itself"
            )

    def tell_end(self, ranks: Iterable[int]) -> None:
        """Tell ranks that wait in `await_end` that the run has ended. Rank 0 does."""
        for rank in ranks if os.getpid() == self._pid else ():
            with suppress(RuntimeError):  # it has ended already
                dist.send(torch.ones(1), group=self._group, group_dst=rank, tag=_END_TAG)

    def await_end(self) -> bool:
        """Whether the run has ended, as rank 0 tells; False if rank 0 has gone without a word.

        Waits for as long as it takes, unlike an exchange.
        """
        told: list[bool] = []

        def listen() -> None:
            work = dist.irecv(torch.empty(1), group=self._group, group_src=0, tag=_END_TAG)
            assert work is not None
            with suppress(RuntimeError):
                work.wait(_NO_TIME_OUT)
                told.append(True)

        # In a thread, since torch doesn't hear Ctrl-C while it waits.
        listening = threading.Thread(target=listen, daemon=True, name="end")
        listening.start()
        listening.join()
        return bool(told)

    def give_up(self, reason: str) -> None:
        """Have every later method raise: this rank has left the common order."""
        self._failure = self._failure or reason

    def close(self) -> None:
        """Close the connections, and end the thread that posts; a forked process has neither."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._posts.close()
            self.give_up("the world has been closed")
            if dist.is_initialized():
                dist.destroy_process_group(self._group)

    @contextmanager
    def _exchange(self, what: str, length: int) -> Iterator[_Exchange]:
        """One exchange; its tag is another than those of other exchanges (W1)."""
        if os.getpid() != self._pid:
            raise WorldError(
                f"this process was forked from rank {self.rank}, and has no connections to other "
                f"ranks: use the world in the process that made it ({self._pid})"
            )
        if self._failure is not None:
            raise WorldError(self._failure)
        self._number += 1
        name, foreseen = self._order.next(what, length)
        tag = zlib.crc32(f"{self._number} {name}".encode()) >> 1
        with self._posts.waiting(self._number, name):
            try:
                yield _Exchange(name, tag, foreseen)
            except _ElsewhereError as error:
                self.give_up(str(error))
                raise WorldError(self._failure) from None
            except RuntimeError as error:  # what torch raises: a time-out, or a connection's end
                self._failure = (
                    f"{self._posts.blame(self._number, name)} (rank {self.rank} of {self.size}, "
                    f"exchange {self._number}, timeout_s={self._timeout_s:g}: "
                    f"{what_failed(error)})"
                )
                raise WorldError(self._failure) from error
            except BaseException:  # Ctrl-C in the middle
                self.give_up("an exchange was cut off")
                raise


class _Exchange(NamedTuple):
    """An exchange that this rank has come to.

    Attributes:
        name: for messages.
        tag: of its messages.
        foreseen: whether other ranks can't be at another one that was foreseen.
    """

    name: str
    tag: int
    foreseen: bool

    @property
    def told(self) -> bytes:
        """The name as others are told it."""
        return self.name.encode()[:_TOLD]


class _ElsewhereError(Exception):
    """Another rank is at another exchange, as all ranks have found."""


def _disagreement(rank: int, its: str, own: str) -> str:
    return (
        f"rank {rank} is at {its!r}, and this one at {own!r}: every rank must do the same in the "
        "same order"
    )


class _Posts:
    """Where each rank says what it waits for, once it has waited for a while.

    Args:
        store: that all ranks reach.
        timeout_s: of an exchange.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._every_s = min(_POST_EVERY_S, timeout_s / 8)
        self._at: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._post_when_late, daemon=True, name="posts")
        self._thread.start()

    @contextmanager
    def waiting(self, number: int, name: str) -> Iterator[None]:
        """This rank waits for the others in an exchange."""
        self._at = f"{number} {name}"
        try:
            yield
        finally:
            self._at = None

    def blame(self, number: int, name: str) -> str:
        """Who has kept this rank from finishing an exchange, in a clause."""
        found: list[str] = []
        # In a thread: a store can't be asked with a time-out.
        asking = threading.Thread(
            target=lambda: found.append(self._ask(number, name)), daemon=True, name="blame"
        )
        asking.start()
        asking.join(2 * self._every_s + _STORE_PATIENCE_S)
        if not found:
            return "the machine that keeps the store of the process group, rank 0's, is silent"
        return found[0]

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_STORE_PATIENCE_S)

    def _post_when_late(self) -> None:
        seen: str | None = None
        while not self._closed.wait(self._every_s):
            at = self._at
            if at is not None and at == seen:
                try:
                    self._store.set(self._key(self._rank), at)
                except RuntimeError:  # the store is gone, and the exchange will tell
                    return
            seen = at

    def _ask(self, number: int, name: str) -> str:
        """Wait until every rank that waits has had the time to say so."""
        end = time.monotonic() + 2.5 * self._every_s
        try:
            self._store.set(self._key(self._rank), f"{number} {name}")
            others = [rank for rank in range(self._size) if rank != self._rank]
            while True:
                posts = {rank: self._post_of(rank) for rank in others}
                absent = [rank for rank, (at, _) in posts.items() if at < number]
                if not absent or time.monotonic() > end:
                    break
                time.sleep(self._every_s / 4)
        except RuntimeError:
            return "the store of the process group is gone, and so is rank 0 or the launcher"
        elsewhere = {rank: what for rank, (at, what) in posts.items() if at == number}
        for rank, what in elsewhere.items():
            if what != name:
                return _disagreement(rank, what, name)
        if absent:
            many = len(absent) > 1
            return (
                f"rank{'s' * many} {', '.join(map(str, absent))} did not come to {name!r}: "
                f"{'they have' if many else 'it has'} ended, {'are' if many else 'is'} stuck, or "
                "can't be reached"
            )
        return f"the connection to another rank failed in {name!r}"

    def _post_of(self, rank: int) -> tuple[int, str]:
        key = self._key(rank)
        if not self._store.check([key]):
            return 0, ""
        number, _, name = self._store.get(key).decode().partition(" ")
        return int(number), name

    def _key(self, rank: int) -> str:
        return f"torchrl_hts/waits/{rank}"
