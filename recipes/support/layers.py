"""How layers are initialised."""

from __future__ import annotations

from torch import nn

__all__ = ["orthogonal"]


def orthogonal(layer: nn.Conv2d | nn.Linear, gain: float) -> nn.Conv2d | nn.Linear:
    """Initialises a layer as the literature does, and returns it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
