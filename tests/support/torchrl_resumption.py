"""Saves and restores TorchRL environments anywhere, and compares every bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchrl.envs import EnvBase

from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.torchrl_env import TorchRLEnvironment
from torchrl_hts.testing import digest

Make = Callable[[], EnvBase]
KEY = "observation"


class Part:
    """An object with slots, one of which is filled later."""

    __slots__ = ("later", "total")

    def __init__(self) -> None:
        self.total = 0.0


class Played:
    """An environment, played by actions that a seed gives."""

    def __init__(self, make: Make, number: int, max_frames: int = 0) -> None:
        generators = Generators(9, number)
        generators.enter()
        self.made = TorchRLEnvironment(make(), number, generators, max_frames_per_traj=max_frames)
        self.episode = torch.zeros(self.made.env.batch_size, dtype=torch.int64)

    def begin(self) -> Played:
        self.current = self.made.begin(range(self.made.env.batch_size.numel()))
        return self

    def play(self, steps: int, seed: int) -> list[str]:
        """Digests of all that the steps give."""
        given = []
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            with torch.random.fork_rng():
                torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
                self.current = self.made.env.rand_action(self.current)
            step, self.current = self.made.advance(self.current)
            given.append(digest(step))
        return given

    def save(self) -> bytes:
        return self.made.save_with(self.current, self.episode)

    def restore(self, state: bytes) -> Played:
        self.current, self.episode = self.made.restore_from(state)
        return self


def check_resumption(make: Make, steps: int = 14) -> None:
    """I7: what is saved goes on in a new environment, and what was saved as if it had not been."""
    one, undisturbed = Played(make, 0).begin(), Played(make, 0).begin()
    for point in range(2):
        assert one.play(steps, point) == undisturbed.play(steps, point)
        state = one.save()
        other = Played(make, 1).begin()  # in use already, and of another number
        other.play(3, 99)
        restored = [Played(make, 2).restore(state), other.restore(state)]
        expected = one.play(steps, 50 + point)
        assert undisturbed.play(steps, 50 + point) == expected
        assert len({*expected}) > 1
        for each in restored:
            assert each.play(steps, 50 + point) == expected
        assert restored[0].restore(restored[1].save()).play(5, 7) == restored[1].play(5, 7)
        one.restore(state).play(steps, 50 + point)  # in its own place


def saved(make: Make) -> bytes:
    played = Played(make, 0).begin()
    played.play(5, 0)
    return played.save()
