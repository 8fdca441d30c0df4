"""A collector that works when it is its turn; for `in_pairs.py`.

    python benchmarks/_contestant.py CHECKOUT WORKLOAD TRAINING NUM_ENVS

Each line of stdin is a number of seconds, for which it collects. It answers with a line: ``speed``
and the steps per second. All that it runs is the checkout's own, so nothing is imported from beside
this file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_SETTLING = 4  # batches after each pause that aren't counted: other caches, other clocks


def main() -> None:
    """Take turns until stdin is closed."""
    checkout = Path(sys.argv[1])
    sys.path[:1] = [str(checkout / part) for part in ("", "recipes", "benchmarks")]
    from _contenders import make_runner

    import torchrl_hts

    if checkout not in Path(torchrl_hts.__file__).parents:
        sys.exit(f"error: {torchrl_hts.__file__} was imported, which isn't of {checkout}")
    workload, training, num_envs = sys.argv[2:]
    runner = make_runner("hts", workload, training, int(num_envs))
    try:
        for line in sys.stdin:
            length_s = float(line)
            for _ in range(_SETTLING):
                runner.advance()
            frames, began = 0, time.perf_counter()
            while (passed := time.perf_counter() - began) < length_s or not frames:
                frames += runner.advance()
            print("speed", frames / passed, flush=True)
    finally:
        runner.close()


if __name__ == "__main__":
    main()
