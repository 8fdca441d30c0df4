"""Seconds from a recipe's start to its first batch, of one or more checkouts in turns.

    python benchmarks/first_batch.py
    python benchmarks/first_batch.py --checkouts ../before . --repetitions 3

Each run is ended when its first row of metrics is there, after the first update. Prints a table of
medians (and of the least and the most), and the seconds of `--help`; `--output FILE` also writes
all values as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _machine import machine
from _recipes import HERE

from torchrl_hts.bench.command_line import count

# 16 environments each; the first row comes with the first batch.
STARTS = {
    "CartPole, PPO": "ppo_cartpole.py --num-envs 16 --log-interval 1",
    "Pong, A2C": "a2c_atari.py --env-id ALE/Pong-v5 --num-envs 16 --log-interval 1",
}


def seconds_to_first_batch(checkout: Path, flags: str) -> float:
    """From the start of the process to the first row that it prints."""
    recipe, *arguments = flags.split()
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        process = subprocess.Popen(
            command(checkout, recipe, *arguments, "--output-dir", f"{directory}/run"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout)},
        )
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if " steps (" in line:
                seconds = time.perf_counter() - began
                process.terminate()
                process.communicate()
                return seconds
        raise SystemExit(f"error: {recipe} of {checkout} has no first batch:\n{''.join(output)}")


def seconds_to_help(checkout: Path) -> float:
    """From the start of the process to its end."""
    began = time.perf_counter()
    subprocess.run(
        command(checkout, "ppo_cartpole.py", "--help"),
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        check=True,
    )
    return time.perf_counter() - began


def command(checkout: Path, recipe: str, *arguments: str) -> list[str]:
    """Unbuffered, for the line that is waited for."""
    return [sys.executable, "-u", str(checkout / "recipes" / recipe), *arguments]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkouts", nargs="+", type=Path, default=[HERE.parent], metavar="DIR")
    parser.add_argument("--repetitions", type=count, default=3, metavar="COUNT")
    parser.add_argument("--output", type=Path, metavar="FILE")
    given = parser.parse_args()
    checkouts = [checkout.resolve() for checkout in given.checkouts]
    found: dict[str, dict[str, list[float]]] = {
        name: {str(checkout): [] for checkout in checkouts} for name in (*STARTS, "--help")
    }
    for _ in range(given.repetitions):
        for name, values in found.items():
            for checkout in checkouts:  # neighbours in time
                flags = STARTS.get(name)
                seconds = (
                    seconds_to_help(checkout)
                    if flags is None
                    else seconds_to_first_batch(checkout, flags)
                )
                values[str(checkout)].append(seconds)
                print(f"{name}, {checkout}: {seconds:.2f} s", file=sys.stderr, flush=True)
    print(f"| seconds | {' | '.join(map(str, given.checkouts))} |")
    print(f"| --- |{' --- |' * len(checkouts)}")
    for name, values in found.items():
        cells = [
            f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
            for each in values.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    if given.output is not None:
        given.output.write_text(json.dumps({"machine": machine(), "seconds": found}, indent=2))


if __name__ == "__main__":
    main()
