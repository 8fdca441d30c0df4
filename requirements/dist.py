"""Builds the source distribution, and the wheel from it: dist.py FOLDER.

From a copy of the sources, so that nothing of an earlier build gets into them and nothing is left
among them. Needs setuptools alone, and no network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = Path(__file__).resolve().parents[1]
NOT_SOURCES = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "runs", "wandb", "*.egg-info"
)


def build(kind: str, sources: Path, folder: Path) -> Path:
    """Runs setuptools as pip does; `kind` is ``"sdist"`` or ``"wheel"``."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=sources, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"error: the {kind} could not be built:\n{done.stdout}{done.stderr}")
    (product,) = folder.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[kind])
    return product


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: dist.py FOLDER")
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("torchrl_hts-*.tar.gz"), *folder.glob("torchrl_hts-*.whl")]:
        old.unlink()
    with TemporaryDirectory() as temporary:
        copy = Path(temporary, "sources")
        shutil.copytree(SOURCES, copy, ignore=NOT_SOURCES)
        sdist = build("sdist", copy, folder)
        shutil.unpack_archive(sdist, temporary)
        wheel = build("wheel", Path(temporary, sdist.name.removesuffix(".tar.gz")), folder)
    print(f"{sdist}\n{wheel}")


if __name__ == "__main__":
    main()
