"""TorchRL environments for tests."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, NonTensor, TensorSpec, Unbounded
from torchrl.envs import EnvBase


class Spoken(EnvBase):
    """Says something beside its observation.

    Args:
        where: `"spec"`, and so everywhere; or at `"reset"` or each `"step"` without a spec.
        what: `"text"`, `"tensor"` or `"ragged"`.
        spec: of what it says.
    """

    def __init__(self, where: str, what: str, spec: TensorSpec | None = None) -> None:
        super().__init__()
        specs = {"text": NonTensor(()), "tensor": Unbounded((3,)), "ragged": Unbounded((-1,))}
        self.where, self.what = where, what
        self.observation_spec = Composite(observation=Unbounded((4,)))
        if where == "spec":
            self.observation_spec["said"] = spec or specs[what]
        self.action_spec = Categorical(3)
        self.reward_spec = Unbounded((1,))

    def _observe(self, where: str) -> dict[str, Any]:
        said = {} if self.where not in ("spec", where) else {"said": self._say()}
        return {"observation": torch.zeros(4), **said}

    def _say(self) -> Any:
        return "hello" if self.what == "text" else torch.ones(3)

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        return TensorDict(self._observe("reset"))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({**self._observe("step"), "reward": torch.ones(1), "done": done})

    def _set_seed(self, seed: int | None) -> None:
        pass
