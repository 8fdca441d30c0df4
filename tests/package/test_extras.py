"""Every ``pip install`` in a message names an extra that has what was missing, or a range."""

from __future__ import annotations

import re
import sys
from importlib.metadata import metadata, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("torchrl_hts", "recipes", "benchmarks", "hydra_plugins")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Of each file with such a message, the package that its reader lacks.
LACKING = {
    "torchrl_hts/envs/atari.py": {"atari": {"ale-py", "opencv-python-headless"}},
    "torchrl_hts/testing/checks.py": {"atari": {"ale-py"}, "envpool": {"envpool"}},
    "torchrl_hts/envs/football.py": {"envpool": {"envpool"}},
    "torchrl_hts/envs/football_engines.py": {"envpool": {"envpool"}},
    "torchrl_hts/envs/ray_cluster.py": {"ray": {"ray"}},
    "torchrl_hts/_reports/picture.py": {"recipes": {"matplotlib"}},
    "torchrl_hts/_evaluation/video.py": {"video": {"imageio-ffmpeg"}},
    "recipes/optuna_sweep.py": {"optuna": {"optuna", "pyyaml"}},
    "recipes/support/films.py": {"video": {"imageio-ffmpeg"}},
    "recipes/support/continuous.py": {"mujoco": {"imageio", "mujoco"}},
    "recipes/support/ray_start.py": {"ray": {"ray"}},
    "recipes/support/minatar_games.py": {"minatar": {"minatar"}},
    "recipes/support/vmas_options.py": {"vmas": {"vmas"}},
    "benchmarks/football_pool.py": {"envpool": {"envpool"}},
}
LOGGERS = ("tensorboard", "wandb")  # whose names recipes/support/loggers.py fills in


def in_extra(extra: str) -> set[str]:
    """Names of the packages that an extra of the installed metadata brings."""
    found = map(Requirement, requires("torchrl_hts") or [])
    return {each.name for each in found if each.marker and f'"{extra}"' in str(each.marker)}


def hints(path: Path) -> set[str]:
    """The extras that a file tells its reader to install."""
    return set(re.findall(r"pip install 'torchrl_hts\[([^]]+)\]'", path.read_text()))


def test_every_hint_is_known_here() -> None:
    found = {str(path.relative_to(ROOT)): hints(path) for path in SOURCES if hints(path)}
    assert found.pop("recipes/support/loggers.py") == {"{package}"}
    assert found == {path: {*extras} for path, extras in LACKING.items()}


@pytest.mark.parametrize("path", LACKING)
def test_the_extra_has_what_was_missing(path: str) -> None:
    for extra, packages in LACKING[path].items():
        assert extra in (metadata("torchrl_hts").get_all("Provides-Extra") or [])
        assert packages <= in_extra(extra)


@pytest.mark.parametrize("package", LOGGERS)
def test_loggers_have_extras_of_their_names(package: str) -> None:
    assert package in in_extra(package)


@pytest.mark.skipif(
    not Path(sys.prefix, ".torchrl_hts-tests-installed").exists(),
    reason="it is for the environment of `make test`, and this is another",
)
def test_no_test_is_skipped_for_want_of_a_package_but_ray() -> None:
    """And but for football, whose engine not every machine can build (`football_installed.py`)."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    wanted = {name for text in texts for name in re.findall(r'importorskip\(\s*"(\w+)', text)}
    assert {"ray", "mujoco", "vmas"} <= wanted
    by_hand = {"ray"} if sys.version_info >= (3, 11) else {"envpool", "ray"}
    assert {name for name in wanted if find_spec(name) is None} <= by_hand
