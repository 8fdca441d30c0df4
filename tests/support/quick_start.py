"""Runs a script as ``python SCRIPT`` does, but that its worker servers are forks.

So a process and its servers import torch once, not three times.

    python quick_start.py SCRIPT ARGUMENTS
"""

from __future__ import annotations

import runpy
import subprocess
import sys

from warm_recipes import popen

import torchrl_hts.collector  # noqa: F401  with torch, before the servers are forked
from torchrl_hts import keep_servers

if __name__ == "__main__":
    subprocess.Popen = popen  # type: ignore[assignment, misc]
    # The servers first: a process had better fork before it has connections.
    with keep_servers():
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
