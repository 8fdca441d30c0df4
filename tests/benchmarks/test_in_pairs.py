"""Two checkouts are compared by turns, each with its own code."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from script_paths import ROOT
from scripts import run_script

pytest.importorskip("ale_py")

FLAGS = ("--pairs", "2", "--seconds", "0.01", "--num-envs", "4")


def test_a_checkout_is_compared_with_another(tmp_path: Path) -> None:
    """A copy whose collector counts each step twice seems twice as fast."""
    copy = tmp_path / "copy"
    for part in ("torchrl_hts", "recipes", "benchmarks"):
        shutil.copytree(ROOT / part, copy / part)
    contenders = copy / "benchmarks" / "_contenders.py"
    text = contenders.read_text()
    assert text.count("return batch.numel()") == 1
    contenders.write_text(text.replace("return batch.numel()", "return 1000 * batch.numel()"))
    printed, _ = run_script("in_pairs.py", str(ROOT), str(copy), *FLAGS)
    found = re.fullmatch(
        rf"{ROOT}: [\d,]+ steps/s\n{copy}: [\d,]+ steps/s\n"
        r"ratio: ([\d.]+), quartiles ([\d.]+)-([\d.]+), 2 pairs\n",
        printed,
    )
    assert found, printed
    assert float(found[1]) > 20


def test_what_is_no_checkout_is_told(tmp_path: Path) -> None:
    _, told = run_script("in_pairs.py", str(ROOT), str(tmp_path), *FLAGS, code=2)
    assert told.endswith(f"{tmp_path} is no checkout: it has no benchmarks/_contenders.py\n")


def test_a_collector_that_ends_is_told(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "_contenders.py").write_text("raise SystemExit(3)")
    said = f"error: the collector of {tmp_path} has ended; see above"
    run_script("in_pairs.py", str(tmp_path), str(ROOT), *FLAGS, code=said)
