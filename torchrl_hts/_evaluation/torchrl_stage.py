"""A TorchRL environment, or a batch of them, in which an episode is played again to be filmed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchrl_hts._evaluation.scenes import TorchRLScene
from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts._executor.torchrl_env import TorchRLEnvironment
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import SharedMemory

__all__ = ["TorchRLStage"]


class TorchRLStage:
    """Plays the episodes of a scene again and shows one of them; used as a gymnasium environment.

    It writes where that scene does, so that nothing may be played meanwhile.

    Args:
        env: like that of the scene, with rendering: by ``render()``, or in a batch, as in VMAS, by
            ``render(mode="rgb_array", env_index=k)``.

    Attributes:
        metadata: of the environment.
        render_mode: what it renders.
    """

    def __init__(self, env: TorchRLEnvironment) -> None:
        self._env = env
        self._row = 0
        self._followed: TorchRLScene | None = None
        self.metadata: dict[str, Any] = dict(getattr(env.env, "metadata", None) or {})
        self.render_mode = "rgb_array"

    def follow(
        self,
        scene: TorchRLScene,
        row: int,
        memory: SharedMemory,
        options: RowOptions,
        written: Mapping[Key, Tensor],
    ) -> None:
        """Show a row of a scene, from the next `reset` on; the others as in its `bind`."""
        self._followed, self._row = scene, row
        self._env.index = scene.index
        self._own = TorchRLScene(self._env, keep_actions=False)
        self._own.bind(memory, options, written)

    def reset(self, *, seed: int | None = None) -> None:
        """Begin as the scene has begun; with the seed of the row, which it knows."""
        if self._followed is None:
            self._env.env.reset()
        else:
            self._own.begin(self._followed.seeds, len(self._followed.seeds))

    def step(self, action: Mapping[Key, Tensor]) -> tuple[None, float, bool, bool, dict[str, Any]]:
        """Step as the scene has stepped, by one of its ``actions``."""
        reward, ended = self._own.step_again(action, self._row)
        return None, reward, ended, False, {}

    def render(self) -> Any:
        """A frame of the row.

        Raises:
            ValueError: if the environment has no such method.
        """
        env = self._env.env
        try:
            render = env.render
        except AttributeError:
            raise ValueError(
                "the environment to film has no method render: leave video_path and "
                "create_render_env_fn out"
            ) from None
        return render(mode="rgb_array", env_index=self._row) if env.batch_size else render()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
