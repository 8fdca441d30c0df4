"""The random states that the simulator VMAS keeps, one of each generator for a whole process.

VMAS puts them in the place of Python's, numpy's and torch's while one of its methods runs. So what
one of its environments draws would depend on which others are in its process, and on who has
stepped first. They are swapped with torch's own state (`generators`).
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

__all__ = ["VmasStates", "fresh_vmas_states", "vmas_states"]

VmasStates = list[Any]  # of torch, numpy and Python, as their functions give and take them
_MODULE = "vmas.simulator.environment.environment"


def vmas_states() -> VmasStates | None:
    """The list that VMAS reads and writes; None where it has not been imported."""
    module = sys.modules.get(_MODULE)
    # Not there while the module is being imported.
    environment = getattr(module, "Environment", None)
    states: VmasStates | None = getattr(environment, "vmas_random_state", None)
    return states


def fresh_vmas_states(python: list[int], numpy: list[int], torch: Any) -> VmasStates:
    """States to begin with.

    Args:
        python: the index, then the words of Python's generator.
        numpy: the words of numpy's generator, then the index.
        torch: the state of torch's generator, uint8.
    """
    words = np.array(numpy[:-1], np.uint32)
    return [
        torch,
        ("MT19937", words, numpy[-1], 0, 0.0),
        (random.Random.VERSION, (*python[1:], python[0]), None),
    ]
