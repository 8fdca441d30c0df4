"""HTSCollector: the public face of the package."""

from __future__ import annotations

from torchrl_hts.collector.collector import HTSCollector

__all__ = ["HTSCollector"]
