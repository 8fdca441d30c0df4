"""Playing what a recipe has trained, as a user does it."""

from __future__ import annotations

import ast
import importlib
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from recipe_runs import CARTPOLE, run, start
from replaying import play
from script_paths import RECIPES
from small_recipes import SMALL, options_of
from support.errors import RecipeError
from support.exporting import export
from support.films import try_out
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv
from torchrl.modules import set_recurrent_mode

from torchrl_hts.envs import make_football

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def trained(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of CartPole with two evaluations."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    run(f"{CARTPOLE} --total-frames 256 --eval-interval 128", "--output-dir", str(directory))
    return directory


@pytest.fixture
def changed(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(trained, tmp_path / "changed")


def test_the_best_policy_plays_what_its_evaluation_played(trained: Path) -> None:
    output = play(trained)
    best = torch.load(trained / "best.pt")
    assert f"ppo_cartpole on CartPole-v1: best.pt, after {best['step']:,} steps" in output
    assert output.count("episode ") == 2
    assert f"mean return {best['return']:.1f} (" in output
    assert "bit for bit what the run's own evaluation gave" in output


def test_another_machine_is_named_where_the_returns_differ(changed: Path) -> None:
    best = torch.load(changed / "best.pt")
    torch.save({**best, "return": -1.0}, changed / "best.pt")
    assert "gave -1.0: the versions and the kind of CPU" in play(changed)
    config = json.loads((changed / "config.json").read_text())
    (start,) = config["starts"]
    start["versions"]["numpy"], start["machine"]["cpu"] = "1.0", "abacus"
    older = {**config, **start}  # as it was written before it had starts
    del older["starts"]
    for written in (config, older):
        (changed / "config.json").write_text(json.dumps(written))
        output = play(changed)
        assert "numpy was 1.0 and is" in output
        assert "cpu was abacus and is" in output


def test_other_episodes_are_not_compared_with_the_evaluations(changed: Path) -> None:
    """Nor where what is other is 0."""
    config = json.loads((changed / "config.json").read_text())
    config["options"] |= {"seed": 3, "eval_max_steps": 5}
    (changed / "config.json").write_text(json.dumps(config))
    assert "the run's own evaluation" in play(changed)
    for flag in ("--seed", "--max-steps"):
        assert "the run's own evaluation" not in play(changed, flag, 0)


def test_episodes_of_a_seed_of_ones_own(trained: Path) -> None:
    flags = (trained, "--policy", "newest", "--episodes", 3)
    outputs = [play(*flags, "--sample", "--seed", seed) for seed in (1, 1, 2)]
    assert outputs[0].count("episode ") == 3
    assert "policy.pt, after 256 steps" in outputs[0]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.fixture(scope="module")
def shown(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in an environment that renders whatever is installed."""
    directory = tmp_path_factory.mktemp("shown") / "run"
    flags = f"{CARTPOLE} --env-id walks:Walk-v0 --total-frames 64"
    run(flags, "--output-dir", str(directory))
    return directory


def test_films(shown: Path, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    for name, first in (("a.mp4", b"ftyp"), ("b.gif", b"GIF89a")):
        play(shown, "--max-steps", 5, "--episodes", 1, "--video", tmp_path / name)
        assert first in (tmp_path / name).read_bytes()[:16]


def test_a_film_without_a_screen(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said of what only a screen needs, by any process."""
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    flags = ["--max-steps", "5", "--episodes", "1", "--video", str(tmp_path / "a.gif")]
    command = [sys.executable, str(RECIPES / "play.py"), str(trained), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "XDG_RUNTIME_DIR" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["a.mp4", "b.gif"])
def test_a_film_that_fails_is_not_told_to_be_there(shown: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("imageio_ffmpeg")
    changed = shutil.copytree(shown, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    config["options"]["env_id"] = "walks:Fades-v0"
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.warns(RuntimeWarning, match="could not be filmed"):
        output = play(changed, "--video", tmp_path / name, code=1)
    assert "episode 2: return" in output
    assert "error: there is no film: ValueError: the light has gone" in output
    assert not (tmp_path / name).exists()


def test_what_no_driver_draws_is_one_sentence_with_advice(shown: Path, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    changed = shutil.copytree(shown, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    config["options"]["env_id"] = "walks:Blind-v0"
    (changed / "config.json").write_text(json.dumps(config))
    output = play(changed, "--video", tmp_path / "film.mp4", code=1)
    assert "error: this environment can't be rendered here: no OpenGL context; where" in output
    assert output.endswith("MuJoCo needs MUJOCO_GL=egl, or osmesa\n")


def test_a_window(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert "there is no screen here" in play(shown, "--render", "human", code=1)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    output = play(shown, "--render", "human", "--episodes", 2, "--max-steps", 3)
    assert output.count("3 steps") == 2


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        (
            "NoWindow-v0",
            "no window can be opened here (RuntimeError: there is no display :0): film",
        ),
        ("NoGlass-v0", "no window can be opened here (evaluator (pid "),
        ("NoPackage-v0", "glass is not installed, run `pip install glass`\n"),
    ],
)
def test_a_window_that_can_not_be_opened(
    shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_id: str, message: str
) -> None:
    changed = shutil.copytree(shown, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    config["options"]["env_id"] = f"walks:{env_id}"
    (changed / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DISPLAY", ":0")
    output = play(changed, "--render", "human", code=1)
    assert f"error: {message}" in output
    assert "Traceback" not in output
    assert output.endswith("film an episode with --video FILE\n") == (env_id != "NoPackage-v0")


def test_what_has_no_window_can_be_filmed() -> None:
    make_env = partial(make_football, "academy_empty_goal_close", engine="envpool")
    said = r"no window \(render_mode is 'human'; .*\): film an episode with --video FILE"
    with pytest.raises(RecipeError, match=said):
        try_out(make_env, "human")
    with pytest.raises(RecipeError, match=r"no window, being TorchRL's: film an .* --video FILE"):
        try_out(lambda render_mode: GymEnv("CartPole-v1"), "human")


def test_a_package_that_is_missing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (trained, "--video", tmp_path / "film.mp4")
    monkeypatch.setitem(sys.modules, "pygame", None)
    output = play(*flags, code=1)
    assert "error: pygame is not installed, run" in output
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert "which is not installed: pip install 'torchrl_hts[video]'" in play(*flags, code=1)


def test_an_exported_policy_acts_alike(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.pt2"
    assert "gives the same actions on 64 observations" in play(trained, "--export", file)
    actions = torch.export.load(file).module()(observation=torch.randn(7, 4))
    assert actions.shape == (7,)


def test_a_disk_without_room_for_an_export(trained: Path, tmp_path: Path) -> None:
    """There is no run to go on with, and nothing of the file."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    file = tmp_path / "policy.pt2"
    process = start("play.py", str(trained), "--export", str(file), preexec_fn=limit)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert f"error: {file} can't be written: File too large. Make room, then give" in output
    assert "--resume" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", SMALL)
def test_each_recipes_policy_can_be_exported(recipe: str, tmp_path: Path) -> None:
    make_env, policy = importlib.import_module(recipe).to_play(options_of(recipe))
    count, states = export(policy, make_env, tmp_path / "policy.pt2")
    assert count >= 64
    assert bool(states) == (recipe == "ppo_recurrent")


def test_an_exported_memory_goes_on_from_step_to_step(tmp_path: Path) -> None:
    make_env, policy = importlib.import_module("ppo_recurrent").to_play(options_of("ppo_recurrent"))
    _, shapes = export(policy, make_env, tmp_path / "policy.pt2")
    act = torch.export.load(tmp_path / "policy.pt2").module()
    states = {name: torch.zeros(3, *shape) for name, shape in shapes.items()}
    seen = torch.randn(5, 3, 2)
    ((name, before),) = states.items()
    for observation in seen:
        _, states = act(observation=observation, states=states)
        assert states[name].shape == before.shape
        assert not torch.equal(states[name], before)
        before = states[name]
    td = TensorDict({"is_init": torch.zeros(3, 5, 1, dtype=torch.bool)}, [3, 5])
    td["observation"] = seen.transpose(0, 1)
    with set_recurrent_mode(True):
        after = policy(td)["next", name][:, -1]
    torch.testing.assert_close(before, after)


def test_what_can_not_be_exported_is_one_sentence(tmp_path: Path) -> None:
    class Asks(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return observation.argmax(-1) if observation.sum() > 0 else observation.argmin(-1)

    make_env = partial(gym.make, "CartPole-v1")
    policy = TensorDictModule(Asks(), ["observation"], ["action"])
    with pytest.raises(RecipeError, match=r"torch\.export can't export this policy: ") as refusal:
        export(policy, make_env, tmp_path / "policy.pt2")
    assert "\n" not in str(refusal.value)
    policy = TensorDictModule(torch.add, ["observation", "wind"], ["action"])
    with pytest.raises(RecipeError, match="policies that read observation, wind can't be exported"):
        export(policy, make_env, tmp_path / "policy.pt2")
    assert not (tmp_path / "policy.pt2").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--video", "film.avi"], "--video must end in .mp4 or .gif, and is film.avi"),
        (["--export", "policy.onnx"], "--export must end in .pt2, and is policy.onnx"),
        (["--episodes", "0"], "--episodes must be at least 1, and is 0"),
        (["--export", "a.pt2", "--video", "a.gif"], "--export plays nothing: leave --video out"),
        (
            ["--export", "a.pt2", "--max-steps", "9"],
            "--export plays nothing: leave --max-",
        ),
        (["--export", "a.pt2", "--seed", "0"], "--export plays nothing: leave --seed out"),
        (["--export", "a.pt2", "--fps", "9"], "--export plays nothing: leave --fps out, or --exp"),
        (["--fps", "9"], "--fps is the speed of a film: leave it out, or give --video FILE"),
        (["--recipe", "mine"], "--recipe mine is no script"),
        (["--video", "setup.cfg/a.gif"], "setup.cfg can't be written to: Not a directory; give"),
        (["--export", "nowhere.pt2"], "--export nowhere.pt2 is a directory: name a file in it"),
    ],
)
def test_wrong_options(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("setup.cfg").touch()
    Path("nowhere.pt2").mkdir()
    assert f"error: {message}" in play(trained, *flags, code=1)


@pytest.mark.parametrize("fps", ["0", "-3", "nan", "fast"])
def test_a_film_has_a_speed(trained: Path, fps: str) -> None:
    output = play(trained, "--video", "a.gif", "--fps", fps, code=2)
    assert f"argument --fps: '{fps}' is no number above 0" in output


def damages() -> Iterator[tuple[str, str]]:
    """Lines of a program that damages a run, and what is said of it then."""
    yield "(run / 'config.json').unlink()", "holds no run: there is no config.json"
    yield "(run / 'config.json').write_text('{')", "config.json is damaged"
    yield "config['recipe'] = 'dqn'", "of the recipe 'dqn', which is not one of these"
    yield "config['recipe'] = 'ray_train'", "the recipe ray_train offers no Options"
    yield "config['options']['wings'] = 2", "doesn't fit this ppo_cartpole ("
    yield "config['options']['env_id'] = 'CartPoll-v1'", "Environment `CartPoll` doesn't exist"
    other = "config['options']['env_id'] = 'Acrobot-v1'"
    yield (
        other,
        "observation space was Box([-4.8, -inf, -0.418879, -inf], [4.8, inf,",
    )
    older = f"{other}; del config['spaces']"  # as an older version has written it
    yield older, "is of shape [64, 4] there and of shape [64"
    yield "config['spaces'] = 2", "config.json is damaged (its spaces can't be 2)"
    yield (
        "config['options']['env_id'] = 'walks:Falls-v0'",
        "walks:Falls-v0 can't be made: OverflowE",
    )
    yield "config['options']['env_id'] = 'walks:Run-v0'", "that a module registers is named MODULE:"
    yield "config['options']['env_id'] = 'Pendulum-v1'", "ppo_mujoco.py plays continuous ones"
    yield "(run / 'best.pt').write_bytes(b'PK')", "best.pt is damaged, or of another version"
    yield "(run / 'best.pt').unlink(); (run / 'policy.pt').write_text('')", "policy.pt is damaged"
    yield "[path.unlink() for path in run.rglob('*.pt')]", "there is no policy in"


@pytest.mark.parametrize(("damage", "message"), [*damages()])
def test_a_run_that_is_damaged_or_of_another_version(
    changed: Path, damage: str, message: str
) -> None:
    config = json.loads((changed / "config.json").read_text())
    exec(damage, {"run": changed, "config": config})
    if "config[" in damage:
        (changed / "config.json").write_text(json.dumps(config))
    output = play(changed, code=1)
    assert message in output
    assert output.count("error: ") == 1
    assert "Traceback" not in output


def test_a_recipe_that_has_not_made_the_run(trained: Path) -> None:
    output = play(trained, "--recipe", RECIPES / "ppo_mujoco.py", code=1)
    assert "doesn't fit this ppo_mujoco.py" in output
    assert output.endswith("or give the script that made it by --recipe\n")


@pytest.mark.parametrize(("script", "more"), [("play", []), ("replay", ["--round", "0"])])
def test_a_damaged_configuration_is_told_before_the_imports(
    changed: Path, script: str, more: list[str]
) -> None:
    (changed / "config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"config\.json is damaged \(.*put the file back"):
        importlib.import_module(script).parse([str(changed), *more])


def test_what_to_do_without_the_newest_policy(changed: Path) -> None:
    newest, advice = changed / "policy.pt", ", or play best.pt by --policy best\n"
    newest.write_bytes(b"PK")
    output = play(changed, "--policy", "newest", code=1)
    assert output.endswith(f"or of another version: put the file back as it was{advice}")
    newest.unlink()
    output = play(changed, "--policy", "newest", code=1)
    assert "error: there is no " in output
    assert output.endswith(f"the first checkpoint: put the file back if it was there{advice}")
    assert "best.pt, after" in play(changed, "--policy", "best")
    (changed / "best.pt").unlink()
    said = "the first checkpoint, and no best.pt: put the file back if it was there\n"
    assert play(changed, code=1).endswith(said)


def test_every_recipe_offers_what_is_played() -> None:
    for script in RECIPES.glob("*.py"):
        text = script.read_text()
        if "from support.run import Run\n" in text:
            names = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
            assert {"train", "to_play"} <= names, script
