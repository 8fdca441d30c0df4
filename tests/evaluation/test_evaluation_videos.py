"""Videos of the best episode so far."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluating import PayingEnv, pays, saved, set_value
from probe import let_it_finish

from torchrl_hts._evaluation.evaluator import Evaluator

pytestmark = pytest.mark.usefixtures("nothing_left")


def rendering(**options: Any) -> Callable[[], Any]:
    return functools.partial(PayingEnv, render_mode="rgb_array", **options)


def num_frames(path: Path) -> int:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    count, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
    return int(count)


def test_the_best_episode_so_far_is_filmed(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "videos" / "best.mp4"
    options: dict[str, Any] = {
        "num_episodes": 4, "video_path": path, "create_render_env_fn": rendering()
    }  # fmt: skip
    policy = pays(2.0)
    with Evaluator(PayingEnv, policy, **options) as evaluator:
        evaluator.submit(0)
        set_value(policy, 1.0)
        evaluator.submit(1)
        best, worse = evaluator.wait()
        assert (best.video, worse.video) == (path, None)
        assert num_frames(path) == 1 + best.lengths[best.returns.index(best.max)]
        state = saved(evaluator.state_dict())
    before = path.stat()
    assert state["best"] == best.max
    with Evaluator(PayingEnv, policy, **options) as evaluator:
        evaluator.load_state_dict(state)
        for step, value in enumerate((1.9, 2.0, -5.0), 2):
            set_value(policy, value)
            evaluator.submit(step)
        assert [result.video for result in evaluator.wait()] == [None] * 3
        assert path.stat().st_mtime_ns == before.st_mtime_ns
        set_value(policy, 2.1)
        evaluator.submit(5)
        assert evaluator.wait()[0].video == path
    assert path.stat().st_mtime_ns != before.st_mtime_ns
    assert list(path.parent.iterdir()) == [path]


def test_the_best_return_of_a_queue_counts_in_its_order(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    policy = pays()
    with Evaluator(
        PayingEnv,
        policy,
        num_episodes=2,
        video_path=tmp_path / "best.mp4",
        create_render_env_fn=rendering(),
    ) as evaluator:
        for step, value in enumerate((1.0, 3.0, 2.0, 4.0)):
            set_value(policy, value)
            evaluator.submit(step)
        let_it_finish(evaluator)  # finished, but not returned
        state = saved(evaluator.state_dict())
        filmed = [result.video is not None for result in evaluator.wait()]
    assert filmed == [True, True, False, True]
    assert state["best"] == -math.inf  # so that a resumed run films the same


def test_a_film_that_fails_is_told_and_the_evaluation_counts(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    policy = pays(2.0)
    with Evaluator(
        PayingEnv,
        policy,
        num_episodes=1,
        video_path=tmp_path / "best.mp4",
        create_render_env_fn=rendering(bonus=0.5),  # another game
    ) as evaluator:
        evaluator.submit(0)
        with pytest.warns(RuntimeWarning, match=r"step 0 .* can't be played again: step 1 of "):
            (first,) = evaluator.wait()
        assert (first.video, "can't be played again" in first.video_error) == (None, True)
        set_value(policy, 1.0)
        evaluator.submit(1)  # the process plays on
        (second,) = evaluator.wait()
    with Evaluator(PayingEnv, pays(2.0), num_episodes=1) as unfilmed:
        unfilmed.submit(0)
        assert first.returns == unfilmed.wait()[0].returns
    assert second.returns < first.returns
    assert not list(tmp_path.iterdir())


class Unseen(PayingEnv):
    """Its pictures are nothing."""

    def render(self) -> Any:
        return None


def test_a_game_that_does_not_render_is_said_at_once(tmp_path: Path) -> None:
    """In one sentence, without a traceback."""
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(TypeError, match=r"^the environment to film .* render_mode='rgb_array'$"):
        Evaluator(
            PayingEnv, pays(), video_path=tmp_path / "best.mp4", create_render_env_fn=PayingEnv
        )
    with pytest.raises(TypeError, match=r"^env.render\(\) gave NoneType; expected an array"):
        Evaluator(
            PayingEnv,
            pays(),
            video_path=tmp_path / "best.mp4",
            create_render_env_fn=functools.partial(Unseen, render_mode="rgb_array"),
        )


def test_a_missing_package_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ModuleNotFoundError, match=r"torchrl_hts\[video\]"):
        Evaluator(
            PayingEnv, pays(), video_path=tmp_path / "best.mp4", create_render_env_fn=rendering()
        )


def test_a_film_that_shutdown_cuts_off_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class Stuck(PayingEnv):
        def render(self) -> np.ndarray:
            if self.t == 2:
                with open(gate, "rb"):
                    pass
            return np.zeros((480, 480, 3), np.uint8)

    folder = tmp_path / "videos"
    evaluator = Evaluator(
        PayingEnv,
        pays(),
        num_episodes=3,
        video_path=folder / "best.mp4",
        create_render_env_fn=functools.partial(Stuck, render_mode="rgb_array"),
    )
    evaluator.submit(0)
    pipe = os.open(gate, os.O_WRONLY)  # it is there
    evaluator.shutdown()
    os.close(pipe)
    assert not list(folder.iterdir())
