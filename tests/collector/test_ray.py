"""`RayCollector` with a collector on each of its nodes; where ray is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from environments import EchoEnv
from policies import marked

from torchrl_hts import HTSCollector

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def _cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    here = Path(__file__).parents[1] / "support"  # ray's workers import what these tests do
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parents[1])]))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("_cluster")
@pytest.mark.filterwarnings("ignore")
def test_ray_collector_makes_collectors_and_keeps_their_policy_up_to_date() -> None:
    from torchrl.collectors.distributed import RayCollector

    policy = marked()
    collector = RayCollector(
        [EchoEnv],
        policy,
        collector_class=HTSCollector,
        collector_kwargs={"seed": 0, "lag": 0},
        num_workers_per_collector=2,
        frames_per_batch=8,
        total_frames=24,
        sync=True,
        remote_configs={"num_cpus": 1, "memory": 2**29},
    )
    collector.update_policy_weights_(policy)
    marks = []
    for batch in collector:
        assert batch.shape == (1, 2, 4)
        marks.append(batch["mark"].unique().tolist())
        with torch.no_grad():
            policy.module.mark.add_(1)
        collector.update_policy_weights_(policy)
    collector.shutdown()
    assert marks == [[0.0], [1.0], [2.0]]
