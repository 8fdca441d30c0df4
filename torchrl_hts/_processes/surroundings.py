"""What a process hands down to those that it starts, for workers that another process forks.

A worker is forked from a server that may be older than its collector. So it is given what it would
have inherited, had the collector's own process started it at the moment in which the collector was
made: `Surroundings.here` is read there, once, and `take_over` comes first in every worker.
"""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_hts._processes.linux import core_numbers, read_system_file

__all__ = ["WORKER_ENVIRONMENT", "Surroundings"]

# One thread per worker, set on purpose: two OpenMP threads each on an oversubscribed machine
# collapse. Where more are asked for, they wait for each other asleep: spinning, they keep the cores
# from those that they wait for.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Servers import what environments do: torch.cuda.is_available() there would else initialise
    # CUDA, which no fork can then use.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

_LIMITS = tuple(sorted({getattr(resource, n) for n in dir(resource) if n.startswith("RLIMIT_")}))

# Its category by module and name: to import the module would take each worker what it costs.
_Filter = tuple[str, Any, tuple[str, str], Any, int]


@dataclass(frozen=True)
class Surroundings:
    """What a process hands down, apart from its open files.

    Attributes:
        environ: environment variables of workers.
        directory: the working directory.
        umask: rights that new files don't get.
        limits: soft and hard limit by resource.
        cores: those that it may run on; None where the system doesn't say.
        niceness: its priority; a higher one is a lower priority.
        blocked: signals that are blocked.
        path, argv: of `sys`.
        filters: of `warnings`, the first one that fits counts.
        authkey: by which multiprocessing's managers know each other.
    """

    environ: Mapping[str, str]
    directory: str
    umask: int
    limits: Mapping[int, tuple[int, int]]
    cores: frozenset[int] | None
    niceness: int
    blocked: frozenset[int]
    path: tuple[str, ...]
    argv: tuple[str, ...]
    filters: tuple[_Filter, ...]
    authkey: bytes

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process now.

        Raises:
            FileNotFoundError: if its working directory has been removed.
        """
        return cls(
            environ={**os.environ, **WORKER_ENVIRONMENT},
            directory=_directory(),
            umask=_umask(),
            limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
            cores=_cores(),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            blocked=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            path=tuple(sys.path),
            argv=tuple(sys.argv),
            filters=_filters(),
            authkey=bytes(multiprocessing.current_process().authkey),
        )

    def take_over(self, started_with: Collection[str]) -> None:
        """Give this process, which has been forked just now, all of it.

        What modules that were imported here have added to the environment stays.

        Args:
            started_with: names of the variables that the process it is a fork of was started with.

        Raises:
            OSError: if the working directory is not there any more, or may not be entered.
        """
        for name in set(started_with) - set(self.environ):
            os.environ.pop(name, None)
        zone = os.environ.get("TZ")
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if os.environ.get("TZ") != zone:
            time.tzset()
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        multiprocessing.current_process().authkey = self.authkey
        _enter(self.directory)
        os.umask(self.umask)
        _set_filters(self.filters)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        _set_priority(self.niceness, self.cores)
        for limit, wanted in self.limits.items():
            _set_limit(limit, wanted)


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "the working directory of this process has been removed, and workers can't start in "
            "it: go to one that is there with os.chdir() before the collector is made"
        ) from error


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise type(error)(
            f"the working directory {directory!r}, in which the collector was made, can't be "
            f"entered any more ({error.strerror}): workers start in it, so it must stay as long as "
            "the collector"
        ) from error


def _umask() -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = read_system_file("/proc/self/status").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    umask = os.umask(0o077)  # it can only be read by setting it: tight, if only for a moment
    os.umask(umask)
    return umask


def _cores() -> frozenset[int] | None:
    numbers = core_numbers()
    return None if numbers is None else frozenset(numbers)


def _set_priority(niceness: int, cores: frozenset[int] | None) -> None:
    """As far as that is allowed: not all may raise a priority, or use cores taken away since."""
    if os.getpriority(os.PRIO_PROCESS, 0) != niceness:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
    if cores is not None and cores != _cores():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def _set_limit(limit: int, wanted: tuple[int, int]) -> None:
    found = resource.getrlimit(limit)
    if found == wanted:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(limit, wanted)
        return
    # Only the administrator may raise a hard limit: then the soft one as far as that goes.
    most = found[1]
    lower = [value for value in (wanted[0], most) if value != resource.RLIM_INFINITY]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(limit, (min(lower, default=resource.RLIM_INFINITY), most))


def _filters() -> tuple[_Filter, ...]:
    found: list[tuple[Any, ...]] = list(warnings.filters)
    return tuple(
        (action, message, (category.__module__, category.__qualname__), module, line)
        for action, message, category, module, line in found
    )


def _set_filters(filters: tuple[_Filter, ...]) -> None:
    """Replace the filters of `warnings`."""
    warnings.resetwarnings()  # which also forgets what has been shown once already
    warnings.filters[:] = [  # type: ignore[index]  # a list, whatever the stub says
        (action, message, _category(*name), module, line)
        for action, message, name, module, line in filters
    ]


class _ByName(type):
    """Of a category of warnings, with all that derive from it, that need not be imported yet."""

    def __subclasscheck__(cls, other: type) -> bool:
        return any((c.__module__, c.__qualname__) == cls.category for c in other.__mro__)

    category: tuple[str, str]


def _category(module: str, name: str) -> Any:
    if module == "builtins":
        return getattr(builtins, name)
    return _ByName(name, (Warning,), {"category": (module, name)})
