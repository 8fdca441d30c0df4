"""High-throughput synchronous deep reinforcement learning for TorchRL.

Importing this package is cheap: names are loaded when they are first used, so that an executor
of plain gymnasium environments never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_hts.collector import HTSCollector
    from torchrl_hts.delayed_gradient import DelayedGradient
    from torchrl_hts.episodes import EpisodeReturns
    from torchrl_hts.errors import (
        CannotSaveError,
        Failure,
        HTSError,
        InvalidValueError,
        PolicyError,
        ProtocolError,
        ResourceError,
        WorkerError,
    )
    from torchrl_hts.evaluation import Evaluation, Evaluator
    from torchrl_hts.servers import keep_servers
    from torchrl_hts.statistics import Statistics, WorkerStatistics
    from torchrl_hts.system import keep_large_blocks
    from torchrl_hts.timeline import Timeline
    from torchrl_hts.undelayed import UndelayedUpdateWarning

__version__ = "0.1.0"

_MODULE_OF = {
    "CannotSaveError": "errors",
    "DelayedGradient": "delayed_gradient",
    "EpisodeReturns": "episodes",
    "Evaluation": "evaluation",
    "Evaluator": "evaluation",
    "Failure": "errors",
    "HTSCollector": "collector",
    "HTSError": "errors",
    "InvalidValueError": "errors",
    "PolicyError": "errors",
    "ProtocolError": "errors",
    "ResourceError": "errors",
    "Statistics": "statistics",
    "Timeline": "timeline",
    "UndelayedUpdateWarning": "undelayed",
    "WorkerError": "errors",
    "WorkerStatistics": "statistics",
    "keep_large_blocks": "system",
    "keep_servers": "servers",
}

__all__ = [
    "CannotSaveError",
    "DelayedGradient",
    "EpisodeReturns",
    "Evaluation",
    "Evaluator",
    "Failure",
    "HTSCollector",
    "HTSError",
    "InvalidValueError",
    "PolicyError",
    "ProtocolError",
    "ResourceError",
    "Statistics",
    "Timeline",
    "UndelayedUpdateWarning",
    "WorkerError",
    "WorkerStatistics",
    "__version__",
    "keep_large_blocks",
    "keep_servers",
]


# These import torchrl, here or in servers that they start.
_WITH_TORCHRL = {"collector", "delayed_gradient", "episodes", "evaluation", "servers"}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        if _MODULE_OF[name] in _WITH_TORCHRL:
            import_module("torchrl_hts.versions")
        return getattr(import_module(f"torchrl_hts.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
