"""What is built to be installed: a source distribution, and a wheel made from it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import torchrl_hts

ROOT = Path(__file__).parents[2]
BASE = f"torchrl_hts-{torchrl_hts.__version__}"

IMPORTS = """
import importlib.metadata, pathlib, pkgutil
import hydra_plugins.torchrl_hts, torchrl_hts, torchrl_hts.envs
for name in torchrl_hts.__all__:
    getattr(torchrl_hts, name)
for module in pkgutil.iter_modules(torchrl_hts.__path__, "torchrl_hts."):
    importlib.import_module(module.name)
assert importlib.metadata.version("torchrl_hts") == torchrl_hts.__version__
print(pathlib.Path(torchrl_hts.__file__).parent)
"""


def sources(folder: str, pattern: str = "*.py") -> set[str]:
    paths = (path for path in (ROOT / folder).rglob(pattern) if "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution and the wheel."""
    command = [
        sys.executable,
        str(ROOT / "requirements/dist.py"),
        str(tmp_path_factory.mktemp("dist")),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sdist, wheel = map(Path, done.stdout.split())
    assert sdist.name == f"{BASE}.tar.gz"
    assert wheel.name == f"{BASE}-py3-none-any.whl"
    return sdist, wheel


def test_the_source_distribution_has_all_that_a_checkout_has(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        members = {name.removeprefix(f"{BASE}/") for name in archive.getnames()}
    for folder in ("torchrl_hts", "hydra_plugins", "recipes", "benchmarks", "tests"):
        assert sources(folder) <= members
    assert sources("docs", "*.md") | sources("requirements", "*.txt") <= members
    rest = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "README.md", "setup.cfg"}
    assert rest | {"torchrl_hts/py.typed", "requirements/football.sh"} <= members
    assert not {name for name in members if "__pycache__" in name or name.startswith("runs")}


def test_the_wheel_has_the_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        members = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = sources("torchrl_hts") | sources("hydra_plugins") | {"torchrl_hts/py.typed"}
    assert members == expected


def test_the_wheel_is_imported_in_an_environment_that_has_never_seen_the_sources(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its requirements are those of this environment, on a path that reads no .pth files."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = str(environment / "bin" / "python")
    install = ["--python", python, "install", "--quiet", "--no-deps", "--no-index", str(built[1])]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, env=alone)
    done = subprocess.run(
        [python, "-c", IMPORTS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=alone | {"PYTHONPATH": sysconfig.get_path("purelib")},
    )
    assert done.returncode == 0, done.stderr
    assert environment in Path(done.stdout.splitlines()[-1]).parents


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == torchrl_hts.__version__
    assert citation["title"] == "torchrl_hts"
    (paper,) = citation["references"]
    assert paper["url"] == "https://arxiv.org/abs/2012.09849"
