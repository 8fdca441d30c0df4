"""W&B's own agent, as `wandb agent` runs it, with a server that is played here.

    python sweep_agent.py SWEEP_FILE

It gives the agent two runs of the sweep. The second one is stopped after its first checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import wandb
import yaml
from wandb import wandb_agent
from wandb.apis.public import sweeps


def main(file: Path) -> None:
    """Runs the agent to its end."""
    sweep = yaml.safe_load(file.read_text())
    chosen = {"learning-rate": 0.002, "epochs": 1, "total-frames": 640, "eval-interval": 320}
    arguments = {name: {"value": value} for name, value in chosen.items()}
    endless = {**arguments, "total-frames": {"value": 10**9}, "checkpoint-interval": {"value": 320}}
    runs = {"first": arguments, "second": endless}

    def heartbeat(api: Any, agent: str, metrics: Any, states: dict[str, bool]) -> list[Any]:
        if states.get("second") and list(Path("runs").glob("*/*/checkpoints/*.pt"))[1:]:
            return [{"type": "stop", "run_id": "second"}]
        if states:
            return []
        if not runs:
            return [{"type": "exit"}]
        name = next(iter(runs))
        command = {"type": "run", "run_id": name, "program": sweep["program"]}
        return [command | {"args": runs.pop(name)}]

    wandb.Api = lambda *_, **__: None
    wandb_agent.Agent.POLL_INTERVAL = 0.1
    os.environ["WANDB_MODE"] = "offline"
    with mock.patch.multiple(
        sweeps,
        _sweep_with_runs=lambda *_: {"config": file.read_text()},
        _register_agent=lambda *_, **__: {"id": "agent"},
        _agent_heartbeat=heartbeat,
    ):
        wandb_agent.run_agent("entity/project/sweep")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
