"""What HTSCollector takes of memory, and what takes it.

    python benchmarks/memory.py --workload 64xpong --num-envs 1024 --training collect
    python benchmarks/memory.py --workload 1024xcostless --num-envs 16384

Collects, learns nothing, and adds up what the processes of a run hold: pages that several share
are counted once (``Pss`` of /proc). The slots are reckoned too: (lag + 1) x environments x steps x
bytes of a step. The largest sum of all is that of a look every tenth of a second.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections import defaultdict

import torch
from _machine import commit, machine
from _processes import held_mib, kinds_of, memory_mib
from _workloads import TRAININGS, find_workload, make_policy

from torchrl_hts import HTSCollector
from torchrl_hts.bench.command_line import count

_KINDS = ("Pss", "Pss_Shmem", "Pss_Anon", "Pss_File")
_LOOK_EVERY_S = 0.1


class Watch(threading.Thread):
    """Looks for the largest sum until it is told to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_mib = 0.0
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(_LOOK_EVERY_S):
            self.most_mib = max(self.most_mib, memory_mib(os.getpid()))

    def end(self) -> float:
        """The largest sum there was."""
        self._end.set()
        self.join()
        return self.most_mib


def print_processes(collector: HTSCollector) -> None:
    """A row for each kind of process, and one for all."""
    held: dict[str, list[dict[str, float]]] = defaultdict(list)
    for pid, kind in kinds_of(collector.worker_pids()).items():
        if own := held_mib(pid):
            held[kind].append(own)
    held["all"] = [each for own in held.values() for each in own]
    print("| processes | MiB | shared with others | its own | of files |")
    print("| --- | --- | --- | --- | --- |")
    for name, own in held.items():
        sums = [sum(each[kind] for each in own) for kind in _KINDS]
        print(f"| {len(own)} {name} | {' | '.join(f'{mib:,.0f}' for mib in sums)} |")


def main() -> None:
    """Read the command line, collect, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="64xpong", help="see throughput.py (64xpong)")
    parser.add_argument("--training", choices=TRAININGS, default="collect", help="(collect)")
    parser.add_argument("--num-envs", type=count, default=1_024, help="(1024)")
    parser.add_argument("--rounds", type=count, default=3, help="that are collected (3)")
    parser.add_argument(
        "--compact-obs", action="store_true", help="leave out next observations in batches"
    )
    options = parser.parse_args()
    workload, training = find_workload(options.workload), TRAININGS[options.training]
    torch.set_num_threads(1)
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, commit {commit()}")
    policy = make_policy(workload, training)
    before = memory_mib(os.getpid())
    watch = Watch()
    watch.start()
    collector = HTSCollector(
        workload.units(options.num_envs),
        policy,
        frames_per_batch=options.num_envs * training.sync_interval,
        seed=0,
        return_same_td=True,
        compact_obs=options.compact_obs,
    )
    with collector:
        batches = iter(collector)
        for _ in range(options.rounds):
            batch = next(batches)
        most = watch.end()
        slots = (collector.lag + 1) * sum(
            value.nbytes for value in batch.values(include_nested=True, leaves_only=True)
        )
        print(f"{workload.description}, {options.num_envs:,} environments, {training.description}")
        print(f"before the collector: {before:,.0f} MiB; most at any time: {most:,.0f} MiB")
        print(f"slots, reckoned: {slots / 2**20:,.0f} MiB\n")
        print_processes(collector)


if __name__ == "__main__":
    main()
