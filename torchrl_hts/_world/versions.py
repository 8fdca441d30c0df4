"""What bits depend on beside the options of a run, and ranks so have to agree on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensordict
import torch
import torchrl

__all__ = ["versions"]


def versions(with_shards: bool) -> Mapping[str, Any]:
    """Versions of all that computes, and with shards the number of threads."""
    from torchrl_hts import __version__

    found = {
        "torchrl_hts": __version__,
        "torch": torch.__version__,
        "tensordict": tensordict.__version__,
        "torchrl": torchrl.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    if with_shards:
        found["threads"] = torch.get_num_threads()
    return found
