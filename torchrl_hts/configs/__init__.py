"""Hydra configurations of the collector, of environments for it, and of the delayed gradient.

Importing this module registers them in Hydra's ConfigStore, in the groups of TorchRL's own
(``torchrl.trainers.algorithms.configs``): ``collector=hts``, ``hook=delayed_gradient``,
``env=hts_gymnasium`` and ``env=hts_atari``. Hydra itself imports it, through the plugin
``hydra_plugins/torchrl_hts.py``, so that a script need not know of it. That holds for every
Hydra application where this package is installed: it must stay cheap, and nothing here imports
torch. What the configurations make is in ``make.py``.
"""

from __future__ import annotations

from torchrl_hts.configs.schema import (
    AtariEnvConfig,
    DelayedGradientConfig,
    GymnasiumEnvConfig,
    HTSCollectorConfig,
)

__all__ = ["AtariEnvConfig", "DelayedGradientConfig", "GymnasiumEnvConfig", "HTSCollectorConfig"]
