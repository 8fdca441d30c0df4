"""Hydra imports what is in this namespace package: our configurations are there in every script."""

import torchrl_hts.configs  # noqa: F401
