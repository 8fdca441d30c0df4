"""What environments and policies draw in evaluations, whatever was played before."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policies import categorical
from torchrl.envs.utils import ExplorationType

from torchrl_hts import Evaluator
from torchrl_hts.envs.drawing import DrawingEnv


class RenderedDraws(DrawingEnv):
    """Pays what it draws, and can be filmed."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__("first step")
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 12}

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(int(action))
        return observation, float(observation.sum()), terminated, truncated, info

    def render(self) -> np.ndarray:
        return np.zeros((16, 16, 3), np.uint8)


@pytest.mark.usefixtures("nothing_left")
class TestEvaluator:
    def evaluate(self, steps: list[int], **options: Any) -> list[Any]:
        with Evaluator(RenderedDraws, categorical(num_actions=2), seed=3, **options) as evaluator:
            for step in steps:
                evaluator.submit(step)
            return evaluator.wait()

    def test_episodes_draw_the_same_whatever_was_played_before(self) -> None:
        first, second, third = self.evaluate([0, 1, 2], num_episodes=4)
        assert first.returns == second.returns == third.returns
        assert len({*first.returns}) == 4
        (fewer,) = self.evaluate([5], num_episodes=2)
        assert fewer.returns == first.returns[:2]

    def test_a_policy_that_draws_goes_another_way_in_each_evaluation(self) -> None:
        options: dict[str, Any] = {
            "num_episodes": 4, "exploration_type": ExplorationType.RANDOM
        }  # fmt: skip
        _, second = self.evaluate([0, 1], **options)
        assert self.evaluate([1], **options) == [second]

    def test_the_film_shows_what_was_played(self, tmp_path: Path) -> None:
        pytest.importorskip("imageio_ffmpeg")
        (evaluation,) = self.evaluate(
            [0],
            num_episodes=3,
            video_path=tmp_path / "best.mp4",
            create_render_env_fn=partial(RenderedDraws, "rgb_array"),
        )
        assert evaluation.video == tmp_path / "best.mp4"
