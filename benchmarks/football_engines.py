"""Plays both engines of football side by side and compares all that they give.

    python benchmarks/football_engines.py --steps 10000
    python benchmarks/football_engines.py --scenarios academy_corner --steps 2000

For each scenario: how many steps differ in observation, score and end (none should), and in the
reward for checkpoints. The environment on EnvPool rebuilds that from what it is told. Actions run
to the right two times in five and are random otherwise, so that checkpoints come up.
"""

from __future__ import annotations

import argparse
from typing import Any

import _recipes  # noqa: F401  so that the package of this checkout is found
import numpy as np
from football_steps import SCENARIOS

from torchrl_hts.bench.command_line import count
from torchrl_hts.envs import make_football

RIGHT = 5  # the action that runs to the opponent's goal


def compare(scenario: str, steps: int) -> dict[str, Any]:
    """Counts of steps and episodes, and of those that differ."""
    envs = [make_football(scenario, engine=engine) for engine in ("gfootball", "envpool")]
    actions = np.random.default_rng(0)
    counts = dict.fromkeys(("other game", "episodes", "steps with checkpoints", "steps", "sums"), 0)
    difference = 0.0
    shown = [env.reset(seed=0)[0] for env in envs]
    counts["other game"] += not np.array_equal(*shown)
    sums = np.zeros(2)
    for _ in range(steps):
        action = RIGHT if actions.random() < 0.4 else int(actions.integers(19))
        (one, _, *ends, info), (other, _, *other_ends, other_info) = (
            env.step(action) for env in envs
        )
        same = np.array_equal(one, other) and info["score"] == other_info["score"]
        counts["other game"] += not (same and ends == other_ends)
        rewards = np.array([info["checkpoint_reward"], other_info["checkpoint_reward"]])
        sums += rewards
        counts["steps with checkpoints"] += rewards[0] != 0
        counts["steps"] += rewards[0] != rewards[1]
        if any(ends):
            counts["episodes"] += 1
            counts["sums"] += not np.isclose(*sums)
            difference += abs(sums[0] - sums[1])
            sums[:] = 0
            counts["other game"] += not np.array_equal(*(env.reset()[0] for env in envs))
    for env in envs:
        env.close()
    return {**counts, "difference": difference / max(counts["episodes"], 1)}


def main() -> None:
    """Parses the flags and prints a row per scenario, in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", type=lambda text: text.split(","), default=SCENARIOS)
    parser.add_argument("--steps", type=count, default=10_000, help="of each scenario (10000)")
    options = parser.parse_args()
    columns = [
        *("scenario", "differ in observation, score or end", "steps with checkpoint rewards"),
        *("steps whose checkpoint reward differs", "episodes", "episodes whose sum differs"),
        "mean difference of sums",
    ]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for scenario in options.scenarios:
        found = compare(scenario, options.steps)
        cells = [
            *(scenario, found["other game"], found["steps with checkpoints"], found["steps"]),
            *(found["episodes"], found["sums"], f"{found['difference']:.3f}"),
        ]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
