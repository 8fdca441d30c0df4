"""The record of what a collector was asked for has all of its arguments."""

from __future__ import annotations

import inspect
from dataclasses import fields

from torchrl_hts import HTSCollector
from torchrl_hts.collector.settings import Settings

# What has done its part when the record is made.
USED_UP = {"create_env_fn", "create_env_kwargs", "policy_factory", "stock_arguments"}
WITHOUT_EFFECT = {"track_policy_version"}


def test_every_argument_is_a_setting() -> None:
    """The configurations of Hydra, and the docstring, are held to the arguments elsewhere."""
    arguments = inspect.signature(HTSCollector).parameters.keys()
    settings = {field.name for field in fields(Settings)}
    assert arguments - settings == USED_UP | WITHOUT_EFFECT
