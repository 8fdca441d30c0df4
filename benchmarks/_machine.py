"""What the figures of a benchmark depend on."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

# Of what is measured, where it is installed.
PACKAGES = ("torch", "torchrl", "tensordict", "gymnasium", "numpy", "ale-py", "gfootball")
PACKAGES += ("envpool", "pufferlib", "stable-baselines3", "sample-factory")


def versions() -> dict[str, str]:
    """By package."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# Of vector instructions, what decides on the kernels of linear algebra; and what overrides that.
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
OVERRIDES = ("OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
OVERRIDES += ("MKL_ENABLE_INSTRUCTIONS",)


def kernels() -> dict[str, str]:
    """Which vector instructions there are, and which kernels torch and numpy's BLAS have chosen."""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    found = {
        "vector_instructions": " ".join(name for name in INSTRUCTIONS if name in flags) or "none",
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        "numpy_blas_kernels": _openblas_core() or "unknown",
    }
    overrides = [f"{name}={os.environ[name]}" for name in OVERRIDES if name in os.environ]
    return {**found, "kernel_overrides": " ".join(overrides)} if overrides else found


def _openblas_core() -> str | None:
    """What the OpenBLAS that numpy has loaded calls the kernels that it runs."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line.split()[-1] for line in lines if "openblas" in line}):
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_"):
            if (ask := getattr(library, name, None)) is not None:
                ask.restype = ctypes.c_char_p
                return str(ask().decode())
    return None


def commit() -> str | None:
    """The commit that is measured, with a + if it was changed since; None where nobody knows."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return ask("rev-parse", "--short", "HEAD") + "+" * bool(
            ask("status", "--porcelain", "-uno")
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def stolen_s() -> float:
    """Seconds of the cores here, since the start, that a virtual machine's host gave to others.

    Of the cores that this process may use, and only when there was something to run on them.
    """
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    words = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    ticks = sum(int(each[8]) for each in words if each and each[0] in own)
    return ticks / os.sysconf("SC_CLK_TCK")


def essentials() -> dict[str, Any]:
    """What two figures must have in common to stand side by side."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        **kernels(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions(),
        "commit": commit(),
    }


def machine() -> dict[str, Any]:
    """The processor, how busy it is, the system, and the versions of what is measured."""
    return {
        **essentials(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
