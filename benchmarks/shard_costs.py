"""What shards cost a single learner: processor time of a gradient, by rows per shard.

    python benchmarks/shard_costs.py

A gradient of a batch of so many rows is taken by `World.gradients` with 1, 2, 4, ... shards, in one
thread. The time is of the cut, of the passes forward and backward, and of the tree of sums.
Networks are the Nature CNN on frames of 4 x 84 x 84, and an MLP of 2 x 64 units on 4 numbers.
Medians of processor time, in turns, and how many times that of one shard.
"""

from __future__ import annotations

import argparse
import statistics
import time

import _recipes  # noqa: F401  so that the package of this checkout is found
import torch
from _machine import commit, machine
from tensordict import TensorDict
from torch import nn

from torchrl_hts import World
from torchrl_hts.bench.command_line import count

SHARDS = [1, 2, 4, 8, 16]
SIZES = {"Nature CNN": (80, 256, 1_280), "MLP": (80, 320, 2_048)}  # rows


def make_network(name: str) -> tuple[nn.Sequential, tuple[int, ...]]:
    """The network, and the shape of an observation."""
    if name == "MLP":
        layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)]
        return nn.Sequential(*layers), (4,)
    trunk = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
    trunk += [nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*trunk, nn.Linear(3_136, 512), nn.ReLU(), nn.Linear(512, 7)), (4, 84, 84)


def time_gradient(world: World, network: nn.Module, batch: TensorDict) -> float:
    """Milliseconds of processor time of one gradient of all rows."""
    began = time.process_time()
    for part in world.gradients(network, batch):
        network(part["observation"].flatten(0, 1)).square().mean().backward()
    took_s = time.process_time() - began
    network.zero_grad()
    return 1e3 * took_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=count, default=7, help="(default: 7)")
    options = parser.parse_args()
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, commit {commit()}, {options.turns} turns\n")
    print("| network | rows | ms, 1 shard |" + "".join(f" {number} |" for number in SHARDS[1:]))
    print("| --- " * (len(SHARDS) + 2) + "|", flush=True)
    torch.manual_seed(0)
    worlds = [World(shards=shards) for shards in SHARDS]
    for name, sizes in SIZES.items():
        network, shape = make_network(name)
        for rows in sizes:
            observation = torch.rand(SHARDS[-1], rows // SHARDS[-1], *shape)
            batch = TensorDict({"observation": observation}, observation.shape[:2])
            times: list[list[float]] = [[] for _ in worlds]
            for turn in range(1 + options.turns):  # the first isn't measured
                for world, own in zip(worlds, times, strict=True):
                    took_ms = time_gradient(world, network, batch)
                    if turn:
                        own.append(took_ms)
            base, *others = map(statistics.median, times)
            cells = [f"{ms / base:.2f}" for ms in others]
            print(f"| {name} | {rows:,} | {base:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
