"""Which engines of football are here; tests of the others skip and say so."""

from __future__ import annotations

import importlib

import pytest

ENGINES = ["gfootball", "envpool"]
_MODULES = {"gfootball": "gfootball_engine", "envpool": "envpool"}
_REMEDIES = {"gfootball": "make football", "envpool": "pip install 'torchrl_hts[envpool]'"}


def need(*engines: str) -> None:
    """Skip the test if one of the engines is not installed."""
    for engine in engines:
        try:
            importlib.import_module(_MODULES[engine])
        except ImportError as error:
            pytest.skip(f"the engine {engine} is not installed ({error}): {_REMEDIES[engine]}")
