"""The picture of the README: who did what when, in four rounds of a run.

    python benchmarks/timeline.py timeline.svg

Six environments whose steps sleep for 20 ms on average (exponentially distributed), rounds of 8
steps, lag 1, updates of 80 ms.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import _recipes  # noqa: F401  so that the package of this checkout is found
from _environments import SleepEnv
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_hts import HTSCollector

NUM_ENVS, ALPHA, ROUNDS = 6, 8, 16
STEP_S, UPDATE_S = 0.02, 0.08


class Policy(nn.Module):
    """Two layers, and the action that comes out on top."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, observation: Tensor) -> Tensor:
        """Actions ``[...]`` for observations ``[..., 64]``."""
        return self.net(observation).argmax(-1)


def main() -> None:
    """Runs, and draws the end of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="ends in .svg, .png or .pdf")
    file: Path = parser.parse_args().file
    frames_per_batch = NUM_ENVS * ALPHA
    with HTSCollector(
        [partial(SleepEnv, env, mean_s=STEP_S) for env in range(NUM_ENVS)],
        TensorDictModule(Policy(), ["observation"], ["action"]),
        frames_per_batch=frames_per_batch,
        total_frames=ROUNDS * frames_per_batch,
        num_executors=NUM_ENVS,
        num_actors=1,
        timeline_events=100_000,
        seed=0,
    ) as collector:
        for _ in collector:
            time.sleep(UPDATE_S)
            collector.update_policy_weights_()
        collector.timeline(file, 4)
    print(f"drawn: {file}")


if __name__ == "__main__":
    main()
