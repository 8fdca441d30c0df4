"""The speed of a checkout relative to another one's: both stand beside each other and take turns.

    git worktree add ../before 54873b6
    python benchmarks/in_pairs.py ../before . --workload cartpole --training a2c5 --pairs 60

A machine whose speed changes from minute to minute tells a few percent apart only so. Each turn of
one is followed at once by a turn of the other, and the ratio of the two counts. Prints both medians
of steps/s, and the median ratio, the second to the first, with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from _recipes import HERE
from _workloads import TRAININGS, WORKLOADS

from torchrl_hts.bench.command_line import count, positive

_CONTESTANT = HERE / "_contestant.py"
_WARM_UP = 3  # turns that aren't counted


class Contestant:
    """A checkout's collector in a process of its own, which works when it is its turn.

    Args:
        checkout: whose package, recipes and benchmarks are used.
        arguments: workload, training and number of environments.
    """

    def __init__(self, checkout: Path, arguments: list[str]) -> None:
        self._checkout = checkout
        self._process = subprocess.Popen(
            [sys.executable, _CONTESTANT, checkout, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, length_s: float) -> float:
        """Steps per second of one turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{length_s}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # then it has no answer either
        for line in self._process.stdout:
            if line.startswith("speed "):
                return float(line.split()[1])
        raise SystemExit(f"error: the collector of {self._checkout} has ended; see above")

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def compare(checkouts: list[Path], arguments: list[str], pairs: int, length_s: float) -> None:
    """Measure and print."""
    contestants = [Contestant(checkout.resolve(), arguments) for checkout in checkouts]
    try:
        for contestant in contestants * _WARM_UP:
            contestant.turn(length_s)
        speeds: list[list[float]] = [[], []]
        for pair in range(pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                speeds[which].append(contestants[which].turn(length_s))
            print(
                f"pair {pair + 1} of {pairs}: {speeds[1][-1] / speeds[0][-1]:.3f}",
                file=sys.stderr,
                flush=True,
            )
    finally:
        for contestant in contestants:
            contestant.close()
    ratios = [second / first for first, second in zip(*speeds, strict=True)]
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if pairs > 1 else ratios * 3
    )
    for checkout, own in zip(checkouts, speeds, strict=True):
        print(f"{checkout}: {statistics.median(own):,.0f} steps/s")
    print(f"ratio: {middle:.3f}, quartiles {low:.3f}-{high:.3f}, {pairs} pairs")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="DIR")
    parser.add_argument("--workload", choices=WORKLOADS, default="costless")
    parser.add_argument("--training", choices=TRAININGS, default="collect")
    parser.add_argument("--num-envs", type=count, default=16, metavar="COUNT")
    parser.add_argument("--pairs", type=count, default=40, metavar="COUNT")
    parser.add_argument("--seconds", type=positive, default=1.0, help="of a turn (1)")
    given = parser.parse_args()
    for checkout in given.checkouts:
        if not (checkout / "benchmarks" / "_contenders.py").is_file():
            parser.error(f"{checkout} is no checkout: it has no benchmarks/_contenders.py")
    compare(
        given.checkouts,
        [given.workload, given.training, str(given.num_envs)],
        given.pairs,
        given.seconds,
    )


if __name__ == "__main__":
    main()
