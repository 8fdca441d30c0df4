"""What the figures of a benchmark depend on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """The processor, how busy it is, the system, and the versions of what is measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "torchrl", "gymnasium")},
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
