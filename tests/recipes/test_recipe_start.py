"""How recipes begin: wrong options are told before torch is imported, and no start is silent."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from policies import categorical
from processes import needs_linux, processes_below, wait_until_gone
from recipe_runs import CARTPOLE, run, start
from script_paths import RECIPES, ROOT
from support.errors import RecipeError
from support.output_dir import claim_output_dir

from torchrl_hts import HTSCollector

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")

SLOW = ("torch", "torchrl", "tensordict", "matplotlib", "rich", "gymnasium")

# Runs a script as Python does, and tells which modules there are where it ends.
TELL = """
import runpy, sys
script, *names = sys.argv[1].split(",")
del sys.argv[:2]
sys.argv.insert(0, script)
sys.path.insert(0, script.rpartition("/")[0])
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    print("imported", *[name for name in names if name in sys.modules], file=sys.stderr)
    sys.exit(end.code)
"""


def loaded(recipe: str, *flags: str, code: int) -> tuple[str, list[str]]:
    """What a recipe says that ends at once, and which slow modules it has imported."""
    command = [sys.executable, "-c", TELL, ",".join([str(RECIPES / recipe), *SLOW]), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code, done.stderr
    (names,) = re.findall("^imported(.*)$", done.stderr, re.MULTILINE)
    return done.stdout + done.stderr, names.split()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_help_needs_nothing_that_is_slow_to_import(path: Path) -> None:
    said, names = loaded(path.name, "--help", code=0)
    assert said.startswith(f"usage: {path.name} ")
    assert not names


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--seed", "-1"], 1, "error: --seed must be at least 0, and is -1"),
        (["--resume", "nowhere"], 1, "error: nowhere holds no run to go on with"),
        (["--require-return", "1", "--eval-interval", "0"], 1, "leave --eval-interval 0 out"),
        (["--num-envs", "many"], 2, "invalid int value: 'many'"),
        (["--num-envs", "1.5"], 2, "invalid int value: '1.5'"),
        (["--num-envs", "inf"], 2, "invalid int value: 'inf'"),
        (["--output-dir", "setup.cfg/run"], 1, "error: setup.cfg/run can't be written to: Not a d"),
    ],
)
def test_wrong_options_are_told_before_torch_is_imported(
    flags: list[str], code: int, message: str
) -> None:
    said, names = loaded("ppo_cartpole.py", *flags, code=code)
    assert message in said
    assert not names


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("WANDB_MODE=airplane", "knows no WANDB_MODE 'airplane': set it to online, offline"),
        ("WANDB_DIR=setup.cfg/wandb", "setup.cfg/wandb can't be written to: Not a directory; set"),
    ],
)
def test_wrong_variables_are_told_before_torch_is_imported(
    variable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable.split("="))
    said, names = loaded("ppo_cartpole.py", "--logger", "wandb", code=1)
    assert message in said
    assert "Traceback" not in said
    assert not names


def test_a_mujoco_gl_that_can_not_be_is_told_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TorchRL imports MuJoCo, whatever is played."""
    pytest.importorskip("mujoco")
    monkeypatch.setenv("MUJOCO_GL", "crayon")
    said, names = loaded("ppo_cartpole.py", code=1)
    assert "error: MuJoCo can't draw with MUJOCO_GL=crayon here (RuntimeError: invalid" in said
    assert "Traceback" not in said
    assert not names


@pytest.mark.parametrize(
    ("flag", "has_begun"), [("--output-dir", False), ("--output-dir", True), ("--resume", True)]
)
def test_a_directory_where_a_run_is_at_work_is_told_before_torch_is_imported(
    flag: str, has_begun: bool, tmp_path: Path
) -> None:
    if has_begun:
        run(f"{CARTPOLE} --total-frames 64 --eval-interval 0", "--output-dir", str(tmp_path))
    with claim_output_dir(tmp_path, holds_own_run=has_begun):
        said, names = loaded("ppo_cartpole.py", flag, str(tmp_path), code=1)
    assert f"error: another run is at work in {tmp_path}: wait for its end" in said
    assert ("or give another --output-dir" in said) == (flag == "--output-dir")
    assert not names


@pytest.mark.parametrize("resumes", [False, True])
def test_a_directory_that_can_not_be_written_to_is_told_with_what_to_do(
    resumes: bool, tmp_path: Path
) -> None:
    """--resume takes no other --output-dir."""
    (tmp_path / ".lock").mkdir()
    remedy = "make it writable, or go on with a copy" if resumes else "give another --output-dir"
    with pytest.raises(RecipeError, match=f"can't be written to: Is a directory; {remedy}"):
        claim_output_dir(tmp_path, holds_own_run=resumes, resumes=resumes)


@pytest.mark.parametrize("left", ["metrics.csv", "checkpoints/step-000000000064.pt"])
def test_what_is_left_of_a_run_is_not_written_over(left: str, tmp_path: Path) -> None:
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).touch()
    message = f"holds what is left of a run, {left}, without its config.json: put that file back"
    with pytest.raises(RecipeError, match=message):
        claim_output_dir(tmp_path, holds_own_run=False)
    said, names = loaded("ppo_cartpole.py", "--output-dir", str(tmp_path), code=1)
    assert message in said
    assert not names


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("ppo_cartpole.py", ["--env-id", "CartPoll-v1"], "error: Environment `CartPoll` doesn't"),
        (
            "ppo_cartpole.py",
            ["--env-id", "json:Walk-v0"],
            "registers is named MODULE:ID",
        ),
        ("a2c_atari.py", ["--env-id", "Pong"], "prefix the name of the game with 'ALE/'"),
        ("ppo_atari.py", ["--env-id", "ALE/Pongg-v5"], "Did you mean: `Pong`"),
        ("ppo_football.py", ["--scenario", "chess"], "error: scenario is 'chess'; expected one"),
    ],
)
def test_a_task_that_there_is_not_is_told_before_torch_is_imported(
    recipe: str, flags: list[str], message: str
) -> None:
    if "atari" in recipe:
        pytest.importorskip("ale_py")
        pytest.importorskip("cv2")
    said, names = loaded(recipe, *flags, code=1)
    assert message in said
    assert "Traceback" not in said
    assert "torch" not in names


def test_a_torchrl_that_is_too_new_is_told_in_one_sentence(tmp_path: Path) -> None:
    of_torchrl = tmp_path / "torchrl-0.15.0.dist-info"
    of_torchrl.mkdir()
    (of_torchrl / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrl\nVersion: 0.15.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))])
    ended = subprocess.run(
        [sys.executable, str(RECIPES / "ppo_cartpole.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ended.returncode == 1
    assert "error: torchrl_hts needs torchrl>=0.14,<0.15 and found 0.15.0" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_ctrl_c_while_the_first_modules_are_imported_is_no_traceback() -> None:
    """Before there are options: argparse is the first that takes a while."""
    program = (
        f"import sys; sys.path.insert(0, {str(RECIPES)!r})\n"
        "class Finder:\n"
        "    def find_spec(self, name, *others):\n"
        "        if name == 'argparse':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import ppo_cartpole\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stderr == "error: interrupted before the run began\n"
    assert ended.returncode == -signal.SIGINT


@needs_linux
def test_the_servers_import_torch_while_the_recipe_does() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(RECIPES)!r}); sys.argv[1:] = []\n"
        "from support.options import RunOptions\n"
        "from support.start import begin\n"
        "class Options(RunOptions):\n"
        "    env_id = 'CartPole-v1'\n"
        "begin(Options, None)\n"
        "import json, os\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "def command(pid):\n"
        "    for _ in range(10**6):\n"
        "        text = open(f'/proc/{pid}/cmdline').read()\n"
        "        if text:  # there is none yet while a program begins\n"
        "            return text\n"
        "    return ''\n"
        "found = [command(pid) for pid in children]\n"
        "servers = sum('fork_server_main' in each for each in found)\n"
        "print(json.dumps([servers, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert json.loads(done.stdout) == [2, False], done.stderr


def test_a_start_says_what_it_is_doing(tmp_path: Path) -> None:
    process = start(f"{CARTPOLE} --total-frames 64", "--output-dir", str(tmp_path))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    said = [
        line.partition(" s  ")[2] for line in output.splitlines() if re.match(r" *\d+\.\d s", line)
    ]
    assert said == [
        "importing torch and torchrl, here and in the workers' servers",
        "trying an environment and the policy out, to choose the number of workers",
        next(
            line for line in said if re.fullmatch(r"making 4 environments \(executors: \d\)", line)
        ),
        next(line for line in said if re.fullmatch(r"calibrating .* \(actors: \d\)", line)),
        "making 2 environments to evaluate in",
    ]


@pytest.mark.parametrize("asked_for", [None, "INFO"])
def test_torchrl_says_what_it_does_only_where_asked(
    asked_for: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would beside the recipe's own lines, on every learner, and where nobody reads."""
    if asked_for is None:
        monkeypatch.delenv("RL_LOGGING_LEVEL", raising=False)
    else:
        monkeypatch.setenv("RL_LOGGING_LEVEL", asked_for)
    code = (
        f"import sys; sys.path.insert(0, {str(RECIPES)!r})\n"
        "from support.start import parse_or_exit\n"
        "parse_or_exit(lambda: None)\n"
        "from torchrl.data import LazyTensorStorage, ReplayBuffer\n"
        "import torch\n"
        "ReplayBuffer(storage=LazyTensorStorage(2)).extend(torch.zeros(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert ("Initialized LazyTensorStorage" in done.stdout) == (asked_for == "INFO")


def test_a_resumed_run_says_where_it_goes_on(tmp_path: Path) -> None:
    run(f"{CARTPOLE} --total-frames 64", "--output-dir", str(tmp_path))
    process = start(f"ppo_cartpole.py --resume {tmp_path}")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert f"going on with the run in {tmp_path}, from its checkpoint at 64 steps" in output
    checkpoint = tmp_path / "checkpoints" / "step-000000000064.pt"
    assert f"resumed from {checkpoint}: 64 of 64 steps are done" in output


def test_an_interrupted_import_leaves_nothing_and_shows_no_traceback() -> None:
    process = start(CARTPOLE)
    assert "importing" in process.stdout.readline()
    servers = processes_below(process.pid)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert output == "error: interrupted before the run began\n"
    wait_until_gone(servers)


def test_a_collector_logs_what_takes_its_time(caplog: pytest.LogCaptureFixture) -> None:
    make_env = functools.partial(gym.make, "CartPole-v1")
    with (
        caplog.at_level(logging.INFO, "torchrl_hts"),
        HTSCollector(
            [make_env] * 2, categorical(num_actions=2), frames_per_batch=8, num_executors=1
        ),
    ):
        assert caplog.messages == [
            "making 2 environments (executors: 1)",
            "calibrating the batch sizes of inference (actors: 1)",
        ]
