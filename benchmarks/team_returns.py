"""Returns of recipes/mappo.py's learner on TorchRL's collector, as in TorchRL's tutorial.

    python benchmarks/team_returns.py --seed 0 --output-dir runs/tutorial-0
    python recipes/mappo.py --seed 0 --total-frames 120000 --output-dir runs/mappo-0
    python benchmarks/runs.py teams.svg 'HTSCollector=runs/mappo-?' 'Collector=runs/tutorial-?'

Networks, loss and updates are the recipe's, with its settings; a batch of 60 environments of VMAS's
navigation steps in the learner's process. Writes what runs.py reads of a recipe's run: metrics.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from recipe_speeds import teams_torchrl

from torchrl_hts import EpisodeReturns
from torchrl_hts.bench.command_line import count, make_directory


def main() -> None:
    """Train, and leave a row for each batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-frames", type=count, default=120_000, help="steps (120000)")
    parser.add_argument("--output-dir", type=Path, required=True)
    given = parser.parse_args()
    make_directory(given.output_dir)
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    returns, steps, rows = EpisodeReturns(), 0, [["step", "episode/return_mean"]]
    with ExitStack() as stack:
        learner, collector = teams_torchrl(1, stack)
        collector.set_seed(given.seed)
        for batch in collector:
            learner.learn(batch)
            collector.update_policy_weights_()
            steps += batch["next", "done"].numel()
            returns.update(batch)
            rows.append([str(steps), str(returns.mean)])
            print(f"{steps:,} steps, {returns.mean:.2f}", file=sys.stderr, flush=True)
            if steps >= given.total_frames:
                break
    for name, table in (("metrics", rows), ("evaluations", [["step", "evaluation/return_mean"]])):
        with (given.output_dir / f"{name}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows(table)


if __name__ == "__main__":
    main()
