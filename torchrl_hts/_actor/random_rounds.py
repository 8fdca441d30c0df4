"""The first rounds of a run, if their actions are drawn at random and the policy isn't asked.

Axes: N environments, T steps of a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from torchrl_hts._actor.passes import Rows
from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise
from torchrl_hts._processes.messages import unpickled
from torchrl_hts._rounds.shared_memory import Layout

__all__ = ["RandomRounds"]


class RandomRounds:
    """Draws the actions of the rounds before a certain one.

    They are those of a collector with that seed that has no policy. To be made and used inside
    `counter_policy.inference`.

    Args:
        policy: pickled; it writes random actions and reads nothing. Without rounds it may be empty.
        end: the first round that isn't at random.
        layout: of the shared memory.
    """

    def __init__(self, policy: bytes, end: int, layout: Layout) -> None:
        self.end, self._layout = end, layout
        self._round = -1
        if end:
            self._policy = CounterPolicy(unpickled(policy), ExplorationType.RANDOM)
            self._policy.prepare(TensorDict({}, [2]))

    def start(self, seed: int) -> None:
        """Get ready for a run."""
        self._round = -1
        if self.end:
            layout, width = self._layout, self._policy.width
            self._noise = CounterNoise(
                seed, layout.num_envs, layout.sync_interval, width, layout.first_env
            )

    def actions(self, round_: int, rows: Rows) -> Mapping[Any, Tensor]:
        """What the policy would write for some rows: the actions alone.

        Args:
            round_: whose rows they are.
            rows: see `Passes`.
        """
        if round_ != self._round:
            words = self._noise.round(round_)
            envs, steps, width = words.shape
            self._round, self._words = round_, words.reshape(envs * steps, width)
        drawn: Mapping[Any, Tensor] = self._policy(TensorDict({}, [len(rows)]), self._words[rows])
        return drawn
