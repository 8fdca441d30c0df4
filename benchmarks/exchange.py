"""How long it takes learners to add up their gradients, beside gloo's all_reduce.

    python benchmarks/exchange.py --learners 2 4

Each learner has a vector of so many values. It is added up by `torch.distributed.all_reduce` over
gloo, by `World.mean` without shards, which does the same, and by `World.mean` with a shard for each
learner. The last adds in the order of the tree. In turns, each after a barrier; a time is that of
the slowest learner, and printed are medians of milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import _recipes  # noqa: F401  so that the package of this checkout is found
import torch
import torch.distributed as dist
from _machine import commit, machine
from torch import Tensor

from torchrl_hts import World
from torchrl_hts.bench.command_line import count

WARM_UP = 3  # turns that aren't measured
VALUES = [10_000, 100_000, 1_690_000]  # the last as many as the Nature CNN has


def all_reduce(vector: Tensor) -> Tensor:
    """The mean of all learners' vectors, by torch.distributed itself."""
    vector = vector.clone()
    dist.all_reduce(vector)
    return vector / dist.get_world_size()


def learn(turns: int, values: list[int]) -> None:
    """What each learner does; the first one prints the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    with World(threads=1) as plain, World(shards=size, threads=1) as shards:
        ways: list[Callable[[Tensor], Tensor]] = [
            all_reduce,
            lambda vector: plain.mean([vector]),
            lambda vector: shards.mean([vector]),
        ]
        for length in values:
            vector = torch.randn(length)
            taken: list[list[float]] = [[] for _ in ways]
            for turn in range(WARM_UP + turns):
                for times, way in zip(taken, ways, strict=True):
                    dist.barrier()
                    began = time.perf_counter()
                    way(vector)
                    took_s = torch.tensor(time.perf_counter() - began)
                    dist.all_reduce(took_s, dist.ReduceOp.MAX)
                    if turn >= WARM_UP:
                        times.append(1e3 * took_s.item())
            if dist.get_rank() == 0:
                base, *others = (statistics.median(times) for times in taken)
                cells = [f"{base:.2f}", *(f"{ms:.2f} ({ms / base:.2f})" for ms in others)]
                print(f"| {size} | {length:,} | {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learners", type=count, nargs="+", default=[2, 4])
    parser.add_argument("--values", type=count, nargs="+", default=VALUES)
    parser.add_argument("--turns", type=count, default=60, help="(default: 60)")
    parser.add_argument("--learner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        learn(options.turns, options.values)
        return
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, commit {commit()}, {options.turns} turns\n")
    print("| learners | values | all_reduce, ms | World.mean, ms | with shards, ms |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    script = [str(Path(__file__).resolve()), "--learner", "--turns", str(options.turns)]
    script += ["--values", *map(str, options.values)]
    for size in options.learners:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        if subprocess.run([*torchrun, "--nproc-per-node", str(size), *script]).returncode:
            sys.exit("a learner has failed")


if __name__ == "__main__":
    main()
