"""TorchRL environments for tests."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, NonTensor, TensorSpec, Unbounded
from torchrl.envs import EnvBase, GymEnv


def cartpole() -> EnvBase:
    """TorchRL's CartPole, with actions as indices."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


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


class Clocks(EnvBase):
    """Counts: an observation is the episode's number, the steps in it, and what actions add up to.

    Args:
        lengths: after how many steps each environment truncates its episodes. At a sum of 7 it
            terminates them.
        alone: whether it is a single environment, and no batch of one.
        num_agents: in a group ``"agents"``, whose members do the same; 0: there is no group.
    """

    def __init__(self, *lengths: int, alone: bool = False, num_agents: int = 0) -> None:
        size = torch.Size([] if alone else [len(lengths)])
        super().__init__(batch_size=size)
        self.lengths = torch.tensor(lengths).view(*size, 1)
        self.group: tuple[str, ...] = ("agents",) if num_agents else ()
        self.members = torch.Size([*size, num_agents] if num_agents else size)
        self.observation_spec = self._spec("observation", Unbounded((*self.members, 3)))
        self.action_spec = self._spec("action", Categorical(3, shape=self.members))
        self.reward_spec = self._spec("reward", Unbounded((*self.members, 1)))
        self.full_done_spec = Composite(
            {name: Categorical(2, (*size, 1), dtype=torch.bool)
             for name in ("done", "terminated", "truncated")},
            shape=size,
        )  # fmt: skip
        self.episode = torch.zeros(*size, 1)
        self.steps = torch.zeros(*size, 1)
        self.sums = torch.zeros(self.members)

    def _spec(self, name: str, spec: TensorSpec) -> Composite:
        below = Composite({name: spec}, shape=self.members)
        return Composite(agents=below, shape=self.batch_size) if self.group else below

    def _of_each(self, value: Any) -> Any:
        """What is of an environment, ``[*, 1]``, for each of its agents."""
        return value.expand(self.members) if self.group else value.squeeze(-1)

    def _observe(self) -> dict[Any, Any]:
        parts = [self._of_each(self.episode), self._of_each(self.steps), self.sums]
        return {(*self.group, "observation"): torch.stack(parts, -1)}

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        begun = torch.ones_like(self.steps, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():
            begun = tensordict["_reset"]
        self.episode = self.episode + begun
        self.steps = self.steps * ~begun
        self.sums = self.sums * ~self._of_each(begun)
        return self._told(self._observe())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict[(*self.group, "action")]
        self.steps = self.steps + 1
        self.sums = self.sums + action
        most = self.sums.amax(-1, keepdim=True) if self.group else self.sums.unsqueeze(-1)
        flags = {"terminated": most >= 7, "truncated": self.steps >= self.lengths}
        flags["done"] = flags["terminated"] | flags["truncated"]
        reward = (action * self._of_each(self.steps)).unsqueeze(-1)
        return self._told({**self._observe(), **flags, (*self.group, "reward"): reward})

    def _told(self, values: dict[Any, Any]) -> TensorDictBase:
        told = TensorDict({}, self.batch_size)
        if self.group:
            told["agents"] = TensorDict({}, self.members)
        for key, value in values.items():
            told[key] = value
        return told

    def _set_seed(self, seed: int | None) -> None:
        pass


class Square(EnvBase):
    """Of a batch size that has two dimensions."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2, 2])

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        raise AssertionError

    _step = _set_seed = _reset
