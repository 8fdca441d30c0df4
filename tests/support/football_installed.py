"""Which engines of football are here; tests of the others skip and say so."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest

ENGINES = ["gfootball", "envpool"]
_MODULES = {"gfootball": "gfootball_engine", "envpool": "envpool"}
_REMEDIES = {"gfootball": "make football", "envpool": "pip install 'torchrl_hts[envpool]'"}


def need(*engines: str) -> None:
    """Skip the test if one of the engines is not installed."""
    for engine in engines:
        try:
            _import(engine)
        except ImportError as error:
            pytest.skip(f"the engine {engine} is not installed ({error}): {_REMEDIES[engine]}")


def is_here(engine: str) -> bool:
    """Whether an engine is installed."""
    try:
        _import(engine)
    except ImportError:
        return False
    return True


def _import(engine: str) -> None:
    # In a thread of its own: EnvPool keeps the frames that it is first imported from, and with
    # those of a test all that is in them.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, _MODULES[engine]).result()
