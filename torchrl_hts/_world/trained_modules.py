"""Modules whose gradients are added up: what is asked of them, and how ranks name them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import nn

from torchrl_hts.errors.wrapped import check_unwrapped

__all__ = ["Seen", "check_module"]


def check_module(module: nn.Module) -> None:
    """Raise ValueError unless a module has all of its parameters, and adds up none by itself."""
    check_unwrapped(module)
    for name, p in module.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ValueError(
                f"the module's parameter {name!r} is uninitialised: run its network on a batch "
                "once before, with the same seed on every rank"
            )


def _check_trained(parameters: Sequence[nn.Parameter]) -> None:
    if not parameters:
        raise ValueError(
            "the module has no parameter with requires_grad, so there is no gradient to take: give "
            "the module that the optimizer trains"
        )
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise TypeError(f"the parameters have several data types, {names}: give them one")
    if parameters[0].is_complex():
        raise TypeError(
            f"the parameters are of {parameters[0].dtype}, whose gradients can't be averaged: make "
            "them real, and view them as complex in forward (torch.view_as_complex)"
        )


class Seen:
    """Modules whose gradients are taken, numbered as they are first seen: alike on every rank.

    Their ids differ from rank to rank. One that is gone leaves its number to nobody.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._count = 0

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._numbers

    def add(self, module: nn.Module) -> None:
        """A module is seen for the first time."""
        self._count += 1
        self._numbers[module] = self._count

    def trained(self, module: nn.Module) -> tuple[list[nn.Parameter], str]:
        """The parameters that are trained, and a name for the exchange of their gradients.

        Raises TypeError or ValueError if there are none, or they can't stand in one vector.

        Gradients of other parameters have another name, also where there are as many of them. It
        holds the module's number and, where some parameters are frozen, a checksum of which.
        """
        every = [*module.parameters()]
        trained = [p for p in every if p.requires_grad]
        _check_trained(trained)
        which = ""
        if len(trained) < len(every):
            checksum = zlib.crc32(bytes(p.requires_grad for p in every))
            which = f", {len(trained)} of {len(every)} parameters trained: {checksum:08x}"
        return trained, f"gradients (module {self._numbers[module]}{which})"
