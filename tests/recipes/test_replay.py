"""Any moment of a training run once more, as a user asks for it."""

from __future__ import annotations

import functools
import importlib
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import support.episodes
import support.failures
import torch
from module_contexts import ToModule
from recipe_runs import CARTPOLE, run
from replaying import replay
from small_recipes import flags_of, is_saved, options_of
from support.errors import RecipeError
from walks import STEP

from torchrl_hts import EnvironmentReplay, InvalidValueError, WorkerError
from torchrl_hts.errors import WorkerId

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")


def files(directory: Path) -> dict[Path, tuple[bytes, int]]:
    """All of a directory, and when it was written."""
    return {
        path: (path.read_bytes(), os.stat(path).st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


def watch_choices(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how much the probabilities that are found differ from those that actions were drawn by."""
    differences: list[float] = []
    found = support.episodes.choices

    def choices(policy: Any, values: Any, observed: Any) -> Any:
        chosen_from = found(policy, values, observed)
        chosen = chosen_from["probability"].gather(1, observed["action"][:, None]).log()
        differences.append((chosen[:, 0] - observed["action_log_prob"]).abs().max().item())
        return chosen_from

    monkeypatch.setattr(support.episodes, "choices", choices)
    return differences


def test_an_episode_of_a_round_is_filmed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the newest checkpoint before it, with the probabilities that its actions had."""
    pytest.importorskip("imageio_ffmpeg")
    differences = watch_choices(monkeypatch)
    before = files(trained)
    outputs = []
    for name in ("a.mp4", "b.gif"):
        flags = (trained, "--round", 18, "--env", 2, "--video", tmp_path / name)
        outputs.append(replay(*flags, *(["--from-start"] if name == "b.gif" else [])))
    assert files(trained) == before
    assert "ppo_cartpole on walks:Walk-v0, from step-000000001024.pt" in outputs[0]
    assert "from its beginning" in outputs[1]
    assert len(differences) > 18
    assert max(differences) < 1e-4
    episodes = [re.findall(r"an episode of (\d+) steps, return (\d+)", o) for o in outputs]
    assert episodes[0] == episodes[1]
    assert "seen from the checkpoint on" not in outputs[0]
    assert "evaluation return" not in outputs[0] + outputs[1], "which would only take time"
    for output in outputs:
        assert "the same as in the run, bit for bit: rows of metrics.csv (" in output
    assert b"ftyp" in (tmp_path / "a.mp4").read_bytes()[:16]
    assert (tmp_path / "b.gif").read_bytes().startswith(b"GIF89a")


def test_a_round_before_all_checkpoints(trained: Path) -> None:
    output = replay(trained, "--round", 0, "--env", 3)
    assert "from its beginning: the run kept 3 checkpoints (--keep-checkpoints), all" in output
    assert "an episode of" in output


def failed_run(directory: Path, env_id: str) -> str:
    """A run of an environment that fails; returns what it has said."""
    flags = f"{CARTPOLE} --env-id walks:{env_id} --total-frames 6400 --eval-interval 0"
    flags += " --log-interval 128 --checkpoint-interval 1024"
    return run(flags, "--output-dir", str(directory), code=1)


def restored(file: str, env_id: str) -> tuple[EnvironmentReplay, Any]:
    """The environment as it was before it failed, and the action that it was given."""
    saved = torch.load(file)
    environment = EnvironmentReplay(
        functools.partial(gym.make, env_id), saved["env"], seed=saved["seed"]
    )
    environment.restore(saved["environment"])
    return environment, saved["action"]


def test_a_run_goes_once_more_into_the_failure_that_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's state just before it lets it fail once more, wherever it is restored."""
    failed = tmp_path / "failed"
    advised = failed_run(failed, "Raises-v0")
    (said,) = re.findall(r"ValueError: (the wing came off at .*)", advised)
    assert f"recipes/replay.py {failed} --until-error goes into" in " ".join(advised.split())
    before = files(failed)
    monkeypatch.chdir(tmp_path)
    output = replay(failed, "--until-error", "--save", "new/failed-error.pt")
    assert files(failed) == before
    assert "from step-000000002048.pt" in output
    assert "environment 2, round 40, step 5: its state is in new/failed-error.pt" in output
    assert f"from there it fails here too: ValueError: {said}" in output
    assert "the same as in the run, bit for bit: rows of metrics.csv (" in output
    environment, action = restored("new/failed-error.pt", "Raises-v0")
    with pytest.raises(ValueError, match=re.escape(said)):
        environment.step(action)


def test_what_was_refused_is_refused_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the executor that failed, at what the environment has returned."""
    monkeypatch.chdir(tmp_path)
    failed_run(Path("failed"), "IsLost-v0")
    output = replay("failed", "--until-error")
    assert "environment 3, round 40, step 5: its state is in failed-error.pt" in output
    refused = "the environment returned NaN in 'observation', at [[0]] of shape (3,)"
    assert f"from there this is refused here too: {refused}" in output
    assert "something outside" not in output
    environment, action = restored("failed-error.pt", "IsLost-v0")
    with pytest.raises(InvalidValueError, match="the environment returned NaN"):
        environment.step(action)


def test_an_environment_that_ends_its_process_does_not_end_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was being stepped is found among all that the executor steps."""
    monkeypatch.chdir(tmp_path)
    assert "ended with exit code 3" in failed_run(Path("failed"), "Exits-v0")
    output = replay("failed", "--until-error")
    assert "environment 3, round 40, step 5: its state is in failed-error.pt" in output
    assert "the step that failed is not played here" in output
    environment, _ = restored("failed-error.pt", "Exits-v0")
    assert environment.env.unwrapped.steps == STEP


def test_an_environment_that_fails_before_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed_run(Path("failed"), "RaisesAtOnce-v0")
    output = replay("failed", "--until-error")
    assert "environment 2, round 0, step 3: its state is in failed-error.pt" in output
    assert "from there it fails here too: ValueError: the wing came off at" in output


def test_a_state_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before the training wherever that can be known."""
    monkeypatch.chdir(tmp_path)
    failed_run(Path("failed"), "RaisesAtOnce-v0")
    name = f"{'long' * 63}.pt"  # that of a temporary file beside it is too long
    output = replay("failed", "--until-error", "--save", name, code=1)
    assert f"error: {name} can't be written: File name too long; give another --save" in output
    Path("failed-error.pt").mkdir()
    output = replay("failed", "--until-error", code=1)
    assert output == "error: --save failed-error.pt is a directory: name a file in it\n"


@pytest.mark.parametrize(
    ("worker", "envs", "message"),
    [
        ("executor", (1, 3), "which environment has failed is not known, of 1, 3: there is no st"),
        ("actor", (1, 3), "no environment has failed in its steps: there is no state to save"),
    ],
)
def test_who_failed_is_not_known(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker: Any,
    envs: tuple[int, ...],
    message: str,
) -> None:
    """As where a process is killed between two steps."""
    error = WorkerError("it left", worker=WorkerId(worker, 0), env_indices=envs)

    def learn(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(support.failures.FailureWatch, "__call__", learn)
    output = replay(trained, "--until-error", "--from-start", code=1)
    assert f"error: {message}" in output


def test_a_run_without_a_failure(trained: Path) -> None:
    output = replay(trained, "--until-error", code=1)
    assert "the training has come to its end, without a failure" in output


@pytest.mark.parametrize(("times", "within"), [(1, nullcontext), (2, nullcontext), (2, ToModule)])
@pytest.mark.parametrize(
    "flags", [["--until-error", "--from-start"], ["--round", 22]], ids=["error", "round"]
)
def test_a_replay_that_is_interrupted_says_nothing_else(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[object],
    times: int,
    within: type[Any],
) -> None:
    """Its directory is deleted: nothing goes on from there, and nothing was to be saved."""

    def interrupted(*_: Any) -> None:
        with within():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(support.failures.FailureWatch, "__call__", interrupted)
    monkeypatch.setattr(support.episodes.EpisodeWatch, "__call__", interrupted)
    output = replay(trained, *flags, code=130)
    assert not re.search("--resume|come to its end|was saved", output), output
    ended = "the training has ended with exit code 130, without a failure" in output
    assert ended == (times == 1 and "--until-error" in flags)
    assert ("error: interrupted\n" in output) == (times == 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--round", "24"], "--round 24: the run has rounds 0 to 23"),
        (["--round", "24", "--from-start"], "--round 24: the run has rounds 0 to 23"),
        (["--round", "-1"], "--round must be at least 0, and is -1"),
        (["--round", "1", "--video", "x.avi"], "--video must end in .mp4 or .gif, and is x.avi"),
        (["--until-error", "--video", "x.gif"], "--until-error makes no film"),
        (["--until-error", "--fps", "9"], "--until-error makes no film: leave --fps out"),
        (["--round", "1", "--fps", "9"], "--fps is the speed of a film: leave it out, or give"),
        (["--until-error", "--env", "0"], "--until-error finds the environment itself"),
        (["--round", "1", "--pdb"], "--pdb is for --until-error"),
        (["--round", "1", "--save", "x.pt"], "--save is for --until-error"),
        (
            ["--until-error", "--save", "/proc/1/stat/x"],
            "/proc/1/stat can't be written to: Not a d",
        ),
    ],
)
def test_wrong_options(trained: Path, flags: list[str], message: str) -> None:
    assert f"error: {message}" in replay(trained, *flags, code=1)


def test_an_environment_that_the_run_has_not_is_told_before_the_imports(trained: Path) -> None:
    with pytest.raises(RecipeError, match="--env 4: the run has environments 0 to 3"):
        importlib.import_module("replay").parse([str(trained), "--round", "22", "--env", "4"])


def test_environments_may_be_counted_otherwise_by_a_recipe_of_users(trained: Path) -> None:
    flags = ["--round", "22", "--env", "4", "--recipe", "own.py"]
    assert importlib.import_module("replay").parse([str(trained), *flags]).env == 4


def test_a_checkpoint_that_is_damaged(changed: Path) -> None:
    newest = max((changed / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-10])
    output = replay(changed, "--round", 23, code=1)
    assert f"the checkpoint {newest} is damaged" in output


@pytest.mark.parametrize("flags", [[], ["--from-start"]])
def test_a_checkpoint_of_another_version(changed: Path, flags: list[str]) -> None:
    newest = max((changed / "checkpoints").iterdir())
    torch.save({"step": 1536}, newest)
    output = replay(changed, "--round", 23, *flags, code=1)
    assert (
        f"error: {newest} is of another version (KeyError: 'parts'): replay it with the" in output
    )
    assert "Traceback" not in output


@pytest.mark.parametrize("flags", [[], ["--from-start"]])
def test_learners_whose_bits_one_alone_cannot_have(changed: Path, flags: list[str]) -> None:
    newest = max((changed / "checkpoints").iterdir())
    torch.save(torch.load(newest, weights_only=True) | {"learners": 2}, newest)
    output = replay(changed, "--round", 23, *flags, code=1)
    assert "error: this run was trained by 2 learners without --shards" in output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "best.pt",
            b"PK",
            "best.pt is damaged, or of another version: put the file back as it was",
        ),
        ("metrics.csv", b"\xff\n", "metrics.csv is damaged ('utf-8' codec can't decode byte"),
        ("metrics.csv", b"step\n1\n", "metrics.csv has 1 rows, and the checkpoint is of"),
    ],
)
def test_files_that_are_damaged(changed: Path, name: str, content: bytes, message: str) -> None:
    (changed / name).write_bytes(content)
    output = replay(changed, "--round", 18, code=1)
    assert f"error: {changed}/{message}" in output, "and not a copy of it"
    assert "Traceback" not in output


def test_a_policy_with_a_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it chose from depends on the state that it had, which batches carry."""
    directory = tmp_path / "run"
    flags = "ppo_recurrent.py --num-envs 4 --sync-interval 16 --minibatch-size 32 --epochs 1"
    flags += " --total-frames 512 --log-interval 64 --eval-interval 0 --checkpoint-interval 256"
    run(flags, "--output-dir", str(directory))
    differences = watch_choices(monkeypatch)
    output = replay(directory, "--round", 6)
    assert "from step-000000000256.pt" in output
    assert "the same as in the run, bit for bit: rows of metrics.csv (" in output
    assert differences
    assert max(differences) < 1e-4


@pytest.mark.timeout(900)  # games are begun twice, on a machine that may be busy
@pytest.mark.parametrize("recipe", ["ppo_mujoco", "a2c_atari", "ppo_football"])
def test_the_tasks_that_the_documentation_shows(recipe: str, tmp_path: Path) -> None:
    """docs/how_to/play_and_replay.md: Hopper, Pong, and football, whose states EnvPool lacks."""
    small = flags_of(recipe)
    if recipe == "ppo_mujoco":
        pytest.importorskip("mujoco")
        small = small.replace("Pendulum-v1", "Hopper-v5")
    round_ = 4 * options_of(recipe).sync_interval
    directory = tmp_path / "run"
    flags = f"{recipe}.py {small} --total-frames {6 * round_} --log-interval {round_}"
    flags += f" --checkpoint-interval {2 * round_} --eval-interval 0"
    run(flags, "--output-dir", str(directory))
    output = replay(directory, "--round", 4, "--env", 3)
    start = f"from step-{2 * round_:012d}.pt" if is_saved(recipe) else "from its beginning"
    assert start in output
    assert "environment 3, round 4: an episode of" in output
    assert "the same as in the run, bit for bit: rows of metrics.csv (" in output
