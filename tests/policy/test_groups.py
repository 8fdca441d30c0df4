"""A policy of several agents is given their group with a batch size for each of them."""

from __future__ import annotations

import torch
from collectors import collect
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import EGreedyModule

AGENTS, EPS = 3, 0.4
KEY = ("agents", "action")


class Team(EnvBase):
    """Three agents that see nothing of interest, without end."""

    def __init__(self) -> None:
        super().__init__()
        seen = Composite(observation=Unbounded((AGENTS, 2)), shape=(AGENTS,))
        self.observation_spec = Composite(agents=seen)
        acts = Composite(action=Categorical(4, shape=(AGENTS,)), shape=(AGENTS,))
        self.full_action_spec = Composite(agents=acts)
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None, **_: object) -> TensorDictBase:
        seen = TensorDict({"observation": torch.zeros(AGENTS, 2)}, [AGENTS])
        return TensorDict({"agents": seen}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ended = {"done": torch.zeros(1, dtype=torch.bool), "reward": torch.zeros(1)}
        return self._reset(None).update(ended)

    def _set_seed(self, seed: int | None) -> None: ...


class Ones(nn.Module):
    """The same action for every agent."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.ones(observation.shape[:-1], dtype=torch.int64)


def test_each_agent_explores_for_itself() -> None:
    spec = Team().full_action_spec
    policy = TensorDictSequential(
        TensorDictModule(Ones(), [("agents", "observation")], [KEY]),
        EGreedyModule(spec=spec, eps_init=EPS, eps_end=EPS, action_key=KEY),
    )
    batch = collect([Team] * 4, policy, rounds=250)
    away = batch[KEY] != 1
    share = EPS * 3 / 4
    assert abs(away.float().mean() - share) < 0.02
    assert abs(away.all(-1).float().mean() - share**AGENTS) < 0.01, "not together"
