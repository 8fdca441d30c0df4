"""High-throughput synchronous deep reinforcement learning for TorchRL.

Importing this package is cheap: names are loaded when they are first used, so that an executor
of plain gymnasium environments never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_hts._evaluation.evaluator import Evaluation, Evaluator
    from torchrl_hts._processes.linux import keep_large_blocks
    from torchrl_hts._processes.server_pool import keep_servers
    from torchrl_hts._reports.episodes import EpisodeReturns
    from torchrl_hts._reports.statistics import Statistics, WorkerStatistics
    from torchrl_hts._reports.timeline import Timeline
    from torchrl_hts._world.world import World
    from torchrl_hts.collector import HTSCollector
    from torchrl_hts.collector.environment_replay import EnvironmentReplay
    from torchrl_hts.collector.torchrl_replay import TorchRLReplay
    from torchrl_hts.delayed_gradient import DelayedGradient
    from torchrl_hts.delayed_gradient.running_norm import RunningNorm
    from torchrl_hts.delayed_gradient.running_reward_norm import RunningRewardNorm
    from torchrl_hts.delayed_gradient.undelayed import UndelayedUpdateWarning
    from torchrl_hts.errors import (
        CannotSaveError,
        EnvError,
        Failure,
        HTSError,
        InvalidValueError,
        PolicyError,
        ProtocolError,
        ResourceError,
        WorkerError,
        WorldError,
    )

__version__ = "0.1.0"

_MODULE_OF = {
    "CannotSaveError": "errors",
    "DelayedGradient": "delayed_gradient",
    "EnvError": "errors",
    "EnvironmentReplay": "collector.environment_replay",
    "EpisodeReturns": "_reports.episodes",
    "Evaluation": "_evaluation.evaluator",
    "Evaluator": "_evaluation.evaluator",
    "Failure": "errors",
    "HTSCollector": "collector",
    "HTSError": "errors",
    "InvalidValueError": "errors",
    "PolicyError": "errors",
    "ProtocolError": "errors",
    "ResourceError": "errors",
    "RunningNorm": "delayed_gradient.running_norm",
    "RunningRewardNorm": "delayed_gradient.running_reward_norm",
    "Statistics": "_reports.statistics",
    "Timeline": "_reports.timeline",
    "TorchRLReplay": "collector.torchrl_replay",
    "UndelayedUpdateWarning": "delayed_gradient.undelayed",
    "WorkerError": "errors",
    "WorkerStatistics": "_reports.statistics",
    "World": "_world.world",
    "WorldError": "errors",
    "keep_large_blocks": "_processes.linux",
    "keep_servers": "_processes.server_pool",
}

__all__ = [
    "CannotSaveError",
    "DelayedGradient",
    "EnvError",
    "EnvironmentReplay",
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
    "RunningNorm",
    "RunningRewardNorm",
    "Statistics",
    "Timeline",
    "TorchRLReplay",
    "UndelayedUpdateWarning",
    "WorkerError",
    "WorkerStatistics",
    "World",
    "WorldError",
    "__version__",
    "keep_large_blocks",
    "keep_servers",
]


# These import torchrl, here or in servers that they start.
_WITH_TORCHRL = {
    "_evaluation.evaluator",
    "_processes.server_pool",
    "_reports.episodes",
    "collector",
    "collector.environment_replay",
    "collector.torchrl_replay",
    "delayed_gradient",
    "delayed_gradient.running_norm",
    "delayed_gradient.running_reward_norm",
    "delayed_gradient.undelayed",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        if _MODULE_OF[name] in _WITH_TORCHRL:
            import_module("torchrl_hts._processes.versions")
        return getattr(import_module(f"torchrl_hts.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
