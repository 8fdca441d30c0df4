"""World: the learners of a run as its user sees them.

Axes: N environments of all learners, n rows of a part of a batch, T steps of a round (alpha).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_hts._processes.uncopied import Uncopied
from torchrl_hts._world import protocol, trained_modules
from torchrl_hts._world.digest import digest
from torchrl_hts._world.draws import PartDraws, minibatches, seeded
from torchrl_hts._world.gradients import LEFT_EARLY, one_by_one, set_gradient, tell_of_odd
from torchrl_hts._world.group import Group
from torchrl_hts._world.joining import join
from torchrl_hts._world.launch import place
from torchrl_hts._world.order import Order
from torchrl_hts._world.sharing import share_machine
from torchrl_hts._world.spares import leave_out_spares
from torchrl_hts._world.standardizing import standardized, standardized_alone
from torchrl_hts._world.tree import check_shards, tree_sum
from torchrl_hts._world.versions import versions
from torchrl_hts.errors.batches import check_batch, check_parts
from torchrl_hts.errors.checks import check_integer, check_seconds

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["World"]


class World(Uncopied):
    """The learners of one run: this process, and those that a launcher has started beside it.

    ``torchrun --nproc-per-node 4 train.py`` starts four learners, each with a fourth of the
    environments and of every batch. So does ``srun``, or a process group that is there already (Ray
    Train). A script that runs by itself is a world of one. Two lines make a loop one of many
    learners: the collector is given the world, and the loss is computed for what `gradients`
    yields::

        world = World(shards=8)
        collector = HTSCollector([make_env] * 16, policy, frames_per_batch=320, world=world)
        for batch in collector:
            with delayed(batch):
                for part in world.gradients(loss_module, batch):
                    advantage(part)
                    loss_of(part).backward()
                clip_grad_norm_(...)
                optimizer.step()
                optimizer.zero_grad()

    After the loop over `gradients` the parameters' ``grad`` is the mean over the batches of all
    learners, the same bits on each of them. So are the parameters, after an optimizer's step.

    **Without shards** gloo's all-reduce adds: same seed and as many learners, same bits.

    **With shards** the bits don't depend on the number of learners either. The batch of all
    environments is cut by environments into so many shards. Advantages, loss and backward run for
    each by itself. The gradients are added in a binary tree, neighbours first, within a learner and
    then over learners. So 1, 2, 4, ... learners give one and the same policy. The number of shards
    is an option of a run as its seed is. Under ``torchrun --max-restarts`` there may be more
    learners than divide it, after a machine was lost say. Those too many are spares: they wait in
    the constructor until the run has ended, and end there.

    Every rank must call the same methods in the same order, each round alike: decide by
    `any`, never by what one rank knows. A rank that doesn't come is named on all others.

    Args:
        shards: parts of a batch, a power of two that the number of learners divides. None: each
            learner's batch is one.
        timeout_s: how long a rank may keep the others waiting.
        threads: torch's intra-op threads in this process. With shards one by default, since bits
            may depend on it; without, this learner's share of the machine's cores, and in a world
            of one as many as there are.

    Attributes:
        rank: this learner, from 0 on.
        size: learners of this run.
        local_size: learners on this machine.
        cores: this learner's share of those that its process may run on.
        is_first: whether this one is rank 0: the one that prints, logs and evaluates.

    Raises:
        TypeError: if a number is of another kind.
        ValueError: if one is too small, or shards and learners don't fit each other, and nothing
            would be started again.
        WorldError: if the ranks don't agree, or their sums are not the same twice.
        SystemExit: on a spare, when the run has ended; with exit code 1 if it has failed.

    Example:
        >>> with World() as world:
        ...     print(world.rank, world.size, world.gather("here"), world.any(False))
        0 1 ['here'] False
    """

    _why_uncopied = "every process of a run makes its own"

    def __init__(
        self, *, shards: int | None = None, timeout_s: float = 300.0, threads: int | None = None
    ) -> None:
        shards = None if shards is None else check_shards(shards)
        timeout_s = check_seconds("timeout_s", timeout_s)
        if threads is not None:
            threads = check_integer("threads", threads)
        self.shards = shards
        self.rank, self.size, local_size = join(place(os.environ), timeout_s)
        self._order = Order()
        self._group = Group(timeout_s, self._order) if self.size > 1 else None
        self.local_size, self.cores = share_machine(self.gather, local_size)
        self._seen = trained_modules.Seen()
        self._draws: PartDraws | None = None
        if threads is None and (shards is not None or self.size > 1):
            threads = 1 if shards is not None else max(1, int(self.cores))
        if threads is not None:
            torch.set_num_threads(threads)
        self.agree(shards=shards, timeout_s=timeout_s, **versions(shards is not None))
        self._everybody, self._spares = self._group, range(0)
        if shards is not None and shards % self.size:
            assert self._group is not None
            self._spares = leave_out_spares(self._group, shards)
            self.size = self._spares.start
            self._group = Group(timeout_s, self._order, self.size) if self.size > 1 else None
            self.local_size, self.cores = share_machine(self.gather, None)
        if self._group is not None and shards is None:
            self._group.check_sums()

    @property
    def is_first(self) -> bool:
        """Whether this learner is rank 0."""
        return self.rank == 0

    # What ranks tell each other.

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on each of them.

        Args:
            value: of this rank, anything that can be pickled.
        """
        return self._exchange("gather", value)

    def _exchange(self, what: str, value: Any) -> list[Any]:
        return [value] if self._group is None else self._group.gather(value, what)

    def _talk(self, what: str, conversation: protocol.Conversation[Any]) -> Any:
        return protocol.talk(conversation, partial(self._exchange, what))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: to stop all at the same round, for instance.

        Args:
            flag: of this rank.
        """
        return bool(self._talk("any", protocol.any_of(flag)))

    def agree(self, **facts: Any) -> None:
        """Raise WorldError on every rank, with the odd one named, unless all have the same facts.

        Args:
            facts: compared as texts, such as the options of a run.
        """
        self._talk("agree", protocol.agree(facts))

    def save(self, write_part: Callable[[], object], write_marker: Callable[[], object]) -> None:
        """Have a checkpoint written by all ranks.

        Args:
            write_part: writes what this rank has.
            write_marker: says that the checkpoint is complete; called on rank 0 alone, after every
                rank's part has been written. Without a marker it is none.

        Raises:
            WorldError: on every rank, if it has failed on one.
        """
        self._talk("save", protocol.save(self.rank, write_part, write_marker))

    # Who has which environments.

    def own(self, items: Sequence[Any], what: str = "environments") -> Sequence[Any]:
        """This rank's share of what is listed for all: ``items[rank * n / size : ...]``.

        Args:
            items: of all ranks.
            what: they are, for messages.

        Raises:
            ValueError: if the items can't be shared out equally among ranks, or shards.
        """
        parts, of = (self.size, "learners") if self.shards is None else (self.shards, "shards")
        if len(items) % parts:
            raise ValueError(f"{len(items)} {what} can't be shared out equally among {parts} {of}")
        count = len(items) // self.size
        return items[self.rank * count : (self.rank + 1) * count]

    # Batches and gradients.

    def _begin_round(self, round_: int) -> None:
        """The collector hands out the batch of a round."""
        self._order.begin_round(round_)

    @property
    def parts_per_rank(self) -> int:
        """Into how many parts this rank's batch is cut."""
        return 1 if self.shards is None else self.shards // self.size

    @property
    def num_parts(self) -> int:
        """The same of all ranks together."""
        return self.size * self.parts_per_rank

    def parts(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """This rank's batch ``[N / size, T]`` in shards ``[N / shards, T]``, or itself without.

        Args:
            batch: as the collector hands it out.

        Raises:
            TypeError: for what is no batch.
            ValueError: if the rows can't be shared out equally.
        """
        if self.shards is None:
            return [check_batch(batch)]
        rows, count = check_batch(batch).shape[0], self.parts_per_rank
        if rows % count:
            raise ValueError(f"{rows} rows can't be cut into {count} shards of the same size")
        return [part.clone() for part in batch.split(rows // count, 0)]  # copies: aligned alike

    def gradients(
        self, module: nn.Module, data: TensorDictBase | Iterable[TensorDictBase]
    ) -> Iterator[TensorDictBase]:
        """Yield the parts to take gradients of; then set the parameters' to the mean of all parts'.

        The loop's body calls ``backward`` on the loss of the part that it is given. The gradients
        of all parts on all ranks have been averaged when the loop has ended, and added to what the
        parameters had before it, as ``backward`` adds.

        Args:
            module: what is trained, a loss module say; the same one, and the same parameters, on
                every rank. They are compared when it is first seen.
            data: a batch, or the parts of it, or of a minibatch, as `parts` and `minibatches` give
                them.

        Raises:
            WorldError: if the ranks' parameters differ, or which are trained, or one doesn't come.
            TypeError: if what is trained has several data types, or a complex one.
            ValueError: if there are more or fewer parts than this rank has, or sparse gradients.
                Also if the module has nothing to train, or a part that is uninitialised or wrapped
                (DistributedDataParallel, DataParallel, FSDP).
        """
        parts = self.parts(data) if isinstance(data, TensorDictBase) else check_parts(data)
        if len(parts) != self.parts_per_rank:
            raise ValueError(f"expected {self.parts_per_rank} parts, got {len(parts)}")
        if self.num_parts == 1:
            yield parts[0]
            return
        if module not in self._seen:
            self._meet(module)
        self._order.begin_pass()
        if self._draws is not None:
            self._draws.begin(parts[0])
        parameters, name = self._seen.trained(module)
        before = [p.grad for p in parameters]
        found: list[Tensor] = []
        try:
            yield from one_by_one(parameters, parts, self._draws, found)
        except GeneratorExit:
            if self._group is not None:
                self._group.give_up(LEFT_EARLY)
            raise
        mean = self._sum(found, name) / self.num_parts
        tell_of_odd(mean, found, self.gather, ranks=self.size)
        set_gradient(parameters, mean, before)

    def _meet(self, module: nn.Module) -> None:
        """A module is seen for the first time."""
        trained_modules.check_module(module)
        self.agree(parameters=digest(module.parameters()))
        self._seen.add(module)
        if self._draws is None:
            seed = self.gather(torch.initial_seed())[0]
            self._draws = PartDraws(seed, self.rank * self.parts_per_rank)

    def minibatches(
        self,
        parts: Sequence[TensorDictBase],
        count: int,
        *,
        seed: int,
        epoch: int,
        whole_rows: bool = False,
    ) -> Iterator[list[TensorDictBase]]:
        """Yield so many minibatches, each of them a part of every part of this rank.

        The steps of each part are permuted by themselves, in an order that depends on the seed, the
        round of the batch, the epoch and the part alone.

        Args:
            parts: ``[n, T]`` each, with ``"policy_version"``, which is the round.
            count: divides n * T; with whole rows, n.
            seed: of the run.
            epoch: counts how often this batch has been gone through.
            whole_rows: permute rows instead of steps, for recurrent networks, which take steps in
                their order. Parts of a minibatch are then ``[n / count, T]``.

        Raises:
            ValueError: if the steps, or rows, can't be shared out equally.
        """
        first = self.rank * self.parts_per_rank
        yield from minibatches(parts, count, first, seed, epoch, whole_rows=whole_rows)

    def drawing(
        self, index: int, *words: int, device: torch.device | str = "cpu"
    ) -> AbstractContextManager[None]:
        """Inside, what torch draws at random depends on a part of the batch, not on who has it.

        For what is drawn outside of `gradients`, such as noise that is added to a minibatch.
        Torch's generators are seeded for the part, and put back afterwards.

        Args:
            index: of this rank's parts.
            words: what else the seed is made of, each 0 or more: the run's seed, the round and the
                epoch, for instance.
            device: where else than on the CPU numbers are drawn.
        """
        number = self.rank * self.parts_per_rank + index
        return seeded((*words, number), torch.device(device))

    def normalize(self, parts: Sequence[TensorDictBase], key: Any = "advantage") -> None:
        """Give the values of all parts on all ranks, taken together, mean 0 and deviation 1.

        As TorchRL's losses do it with ``normalize_advantage=True``, of a whole minibatch.

        Args:
            parts: of a minibatch, or of a batch, of any lengths; written to.
            key: of the values.
        """
        values = [part.get(key) for part in parts]
        if self.size == 1 and self.shards is None:
            parts[0].set(key, standardized_alone(values[0]))
            return
        for part, value in zip(parts, standardized(values, self._sum), strict=True):
            part.set(key, value)

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """The mean of a tensor over all parts on all ranks, such as of losses.

        Args:
            values: one tensor for each part of this rank, all of one shape.

        Raises:
            ValueError: if there are more or fewer values than this rank has parts.
        """
        if len(values) != self.parts_per_rank:
            raise ValueError(f"expected a value for {self.parts_per_rank} parts, got {len(values)}")
        flat = [value.detach().reshape(-1) for value in values]
        return (self._sum(flat, "a mean") / self.num_parts).reshape(values[0].shape)

    def _sum(self, vectors: Sequence[Tensor], what: str) -> Tensor:
        """The sum of one vector for each part on all ranks."""
        own = tree_sum(vectors) if len(vectors) > 1 else vectors[0].clone()  # written to below
        if self._group is None:
            return own
        add = self._group.all_reduce if self.shards is None else self._group.tree_sum
        return add(own.cpu(), what).to(own.device)

    # The end.

    def close(self, *, ended: bool = True) -> None:
        """Leave the world; may be called again.

        The process group stays for another world, unless you destroy it on every rank.

        Args:
            ended: whether the run has come to its end. Spare learners then end well; else they
                fail, as this process should too, so that the launcher starts all again.
        """
        if ended and self.is_first and self._everybody is not None:
            self._everybody.tell_end(self._spares)
        self._spares = range(0)
        for group in (self._group, self._everybody):
            if group is not None:
                group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(ended=exception[0] is None)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, shards={self.shards})"
