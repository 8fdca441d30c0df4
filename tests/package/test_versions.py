"""A TorchRL or tensordict that is too old or too new is refused in one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_hts._processes.versions import RANGES, check

ROOT = Path(__file__).parents[2]

# What users import, and the modules that are run or named by themselves.
DOORS = [
    "from torchrl_hts import HTSCollector",
    "from torchrl_hts import DelayedGradient",
    "from torchrl_hts import Evaluator",
    "from torchrl_hts import EpisodeReturns",
    "import torchrl_hts.testing",
    "import torchrl_hts.bench.__main__",
    "import torchrl_hts.configs.make",
]


def run_with(folder: Path, name: str, version: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code where a package's metadata say that it has a version."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


@pytest.mark.parametrize("door", DOORS)
def test_every_door_says_it_in_one_sentence_before_torch_is_imported(
    tmp_path: Path, door: str
) -> None:
    code = f"import sys\ntry:\n    {door}\nfinally:\n    print('torch' in sys.modules)"
    done = run_with(tmp_path, "torchrl", "0.13.2", code)
    assert done.stdout.strip() == "False"
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torchrl_hts needs torchrl>=0.14,<0.15 and found 0.13.2, which is too old: "
        "pip install 'torchrl>=0.14,<0.15'"
    )


def test_an_executors_path_asks_for_no_torchrl(tmp_path: Path) -> None:
    code = "import torchrl_hts._executor.loop, torchrl_hts.envs"
    done = run_with(tmp_path, "torchrl", "0.13.2", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("torchrl", "0.15.0", "torchrl>=0.14,<0.15 and found 0.15.0, which is too new: pip"),
        ("torchrl", "0.15.0.dev20261001+cpu", "which is too new"),
        ("torchrl", "1.0", "which is too new"),
        ("torchrl", "0.9.2", "which is too old"),
        ("torchrl", None, "torchrl>=0.14,<0.15, which is not installed: pip install"),
        ("tensordict", "0.15.3", "tensordict>=0.14,<0.15 and found 0.15.3, which is too new"),
        ("tensordict", "0.13.0", "which is too old"),
    ],
)
def test_versions_outside_of_the_range_are_refused(
    name: str, version: str | None, said: str
) -> None:
    with pytest.raises(ImportError) as caught:
        check(name, version)
    assert said in str(caught.value)
    assert caught.value.name == name


@pytest.mark.parametrize("version", ["0.14", "0.14.0", "0.14.9", "0.14.1+cu130", "0.14.0rc1"])
def test_versions_inside_are_taken(version: str) -> None:
    for name in RANGES:
        check(name, version)


def test_the_torches_that_are_tried_are_in_the_range_that_pip_keeps_to() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (first, end) = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', project)[0]
    pinned = re.findall(r"^torch==(.*)$", (ROOT / "requirements/constraints.txt").read_text(), re.M)
    others = re.findall(r"^OTHER_TORCHES := (.*)$", (ROOT / "Makefile").read_text(), re.M)[
        0
    ].split()
    assert len(pinned) == 1
    assert len(others) == 2
    for tried in (*pinned, *others):
        assert numbers(first) <= numbers(tried) < numbers(end)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_ranges_are_those_that_pip_keeps_to() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name, (first, end) in RANGES.items():
        assert re.findall(rf'"{name}(>.*)"', project) == [f">={first},<{end}"]
