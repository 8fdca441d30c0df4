"""Modes of TensorDict and torch by which environments and policies compute, handed to workers.

A worker is forked from a server, in which they are what they were when it imported these packages.
Imports neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["TensorDictModes", "TorchModes"]

# By the variable that is read where the package is imported: where its mode is told, and how.
_MODES = {
    "CAPTURE_NONTENSOR_STACK": ("tensordict", "capture_non_tensor_stack"),
    "COMPOSITE_LP_AGGREGATE": ("tensordict.nn", "composite_lp_aggregate"),
    "LAZY_LEGACY_OP": ("tensordict", "lazy_legacy"),
    "LIST_TO_STACK": ("tensordict", "list_to_stack"),
}

# What has a precision of its own; "" are all that have none.
_BACKENDS = ["", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"]
_BACKENDS += ["cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn"]


@dataclass(frozen=True)
class TensorDictModes:
    """What ``tensordict.set_list_to_stack`` and its like have set.

    Attributes:
        modes: by the environment variable of the same meaning; none of what isn't imported.
    """

    modes: Mapping[str, bool]

    @classmethod
    def here(cls) -> TensorDictModes:
        """Those of this process now."""
        return cls(
            {
                variable: bool(getattr(sys.modules[module], name)())
                for variable, (module, name) in _MODES.items()
                if module in sys.modules
            }
        )

    def take_over(self, started_with: Collection[str]) -> None:
        """Set them in this process, for a later import too; see `Surroundings.take_over`."""
        for variable, mode in self.modes.items():
            module, name = _MODES[variable]
            if module not in sys.modules:
                os.environ[variable] = str(mode)
            elif getattr(sys.modules[module], name)() != mode:
                getattr(sys.modules[module], f"set_{name}")(mode).set()


@dataclass(frozen=True)
class TorchModes:
    """What ``torch.set_float32_matmul_precision`` has set, or ``torch.backends.fp32_precision``.

    For workers that have torch.

    Attributes:
        precision: of products of float32 matrices; None where backends have their own.
        of_backends: these, by the names of backends and operations below ``torch.backends``.
    """

    precision: str | None
    of_backends: Mapping[str, str]

    @classmethod
    def here(cls) -> TorchModes:
        """That of this process now, which has imported torch."""
        torch = sys.modules["torch"]
        try:
            return cls(torch.get_float32_matmul_precision(), {})
        except RuntimeError:  # torch refuses to say, where it was set by backends
            return cls(None, {name: _backend(name).fp32_precision for name in _BACKENDS})

    def take_over(self, started_with: Collection[str]) -> None:
        """Set it in this process; see `Surroundings.take_over`."""
        if self.precision is not None:
            sys.modules["torch"].set_float32_matmul_precision(self.precision)
        for name, precision in self.of_backends.items():
            _backend(name).fp32_precision = precision


def _backend(name: str) -> Any:
    found: Any = sys.modules["torch"].backends
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found
