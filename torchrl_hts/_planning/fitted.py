"""Policies whose keys depend on the environment."""

from __future__ import annotations

from abc import abstractmethod

from tensordict.nn import TensorDictModuleBase

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.torchrl_env import TorchRLDescription

__all__ = ["Description", "Fitted"]

Description = GymDescription | TorchRLDescription


class Fitted(TensorDictModuleBase):  # type: ignore[misc]  # tensordict has no types
    """A policy whose keys depend on the environment."""

    @abstractmethod
    def fit(self, description: Description) -> None:
        """Find `in_keys` and `out_keys` for such an environment; called before all else."""
