"""Advice about the arguments and attributes of TorchRL's collectors, followed."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from typing import Any

import pytest
import torch
from collectors import start
from environments import EchoEnv
from policies import categorical, marked
from tensordict import TensorDictBase

from torchrl_hts import DelayedGradient, HTSCollector
from torchrl_hts.collector.stock_arguments import STOCK_ARGUMENTS, take_stock_arguments
from torchrl_hts.collector.stock_attributes import ABSENT

pytestmark = pytest.mark.usefixtures("warm_servers")
OURS = inspect.signature(HTSCollector.__init__).parameters
NAMED = {"num_envs", "sync_interval", "frames_per_batch"}  # attributes that its constructor sets
OTHERS = {"policy_version", "replay_buffer", "collector_class", "zero_"}  # of batches, and TorchRL
OTHERS |= {"action_spec", "target_entropy"}  # of TorchRL's losses


def sentences() -> dict[str, str]:
    refused = {name: a.why for name, a in STOCK_ARGUMENTS.items() if not a.any_value}
    return refused | ABSENT


def collect(**kwargs: Any) -> TensorDictBase:
    """The first batch of two environments, in rounds of 4 steps."""
    with start([EchoEnv] * 2, marked(), num_actors=1, **kwargs) as collector:
        return next(iter(collector)).clone()


@pytest.mark.parametrize("name", sentences())
def test_what_a_sentence_names_is_there(name: str) -> None:
    """Names with an underscore, with a call or with a dot are arguments, attributes or modules."""
    why = sentences()[name]
    for word in re.findall(r"[A-Za-z_][\w.]*(?:_[\w.]*|\(|\.\w+)", why):
        called = word.rstrip("(.")
        if called == name:
            continue
        first, *rest = called.split(".")
        if first in ("torchrl_hts", "torchrl", "torch", "os"):
            found: Any = importlib.import_module(".".join([first, *rest[:-1]]))
            assert hasattr(found, rest[-1]), called
        elif first in ("batch", "policy"):
            found = collect() if first == "batch" else marked()
            assert all(hasattr(found, part) for part in rest), called
        elif called not in OTHERS:
            assert called in OURS or hasattr(HTSCollector, called) or called in NAMED, called


def test_steps_that_are_left_out() -> None:
    """For ``reset_when_done`` and the length of trajectories: postproc."""

    def first_two(batch: TensorDictBase) -> TensorDictBase:
        return batch[:, :2]

    for name in ("reset_when_done", "trajs_per_batch", "traj_format"):
        with pytest.raises(TypeError, match="postproc"):
            take_stock_arguments({name: "other"})
    assert collect(postproc=first_two).shape == (2, 2)
    assert ("collector", "mask") in collect(split_trajs=True).keys(True)


def test_episodes_that_are_cut() -> None:
    with pytest.raises(TypeError, match="use max_frames_per_traj to cut them"):
        take_stock_arguments({"reset_at_each_iter": True})
    assert collect(max_frames_per_traj=2)["next", "truncated"][:, 1].all()


def test_the_version_under_another_key() -> None:
    with pytest.raises(TypeError, match="rename it with postproc, after which DelayedGradient"):
        take_stock_arguments({"policy_version_key": "age"})
    batch = collect(postproc=lambda batch: batch.rename_key_("policy_version", "age"))
    assert not batch["age"].any()
    with pytest.raises(KeyError, match="policy_version"):
        DelayedGradient(marked())(batch)


def test_threads_cores_and_devices() -> None:
    for name, advice in [
        ("num_threads", "use actor_threads, and torch.set_num_threads"),
        ("worker_affinity", "start Python with taskset, whose cores all workers inherit"),
        ("driver_affinity", r"call os\.sched_setaffinity once the collector is made"),
        ("device_config", "use device, storing_device, policy_device and env_device"),
        ("visible_devices", "use policy_device and env_device"),
    ]:
        with pytest.raises(TypeError, match=advice):
            take_stock_arguments({name: object()})
    before = os.sched_getaffinity(0)
    devices: Any = dict.fromkeys(("device", "storing_device", "policy_device", "env_device"), "cpu")
    try:
        os.sched_setaffinity(0, {min(before)})  # as taskset does
        collector = start([EchoEnv], marked(), actor_threads=2, **devices)
        with collector:
            for pid in collector.worker_pids().values():
                assert os.sched_getaffinity(pid) == {min(before)}
            os.sched_setaffinity(0, before)
            assert next(iter(collector))["observation"].device == torch.device("cpu")
    finally:
        os.sched_setaffinity(0, before)


def test_numbers_of_workers() -> None:
    for name, advice in [
        ("collector_class", "num_executors and num_actors"),
        ("envs_per_worker", "use num_executors"),
        ("max_batch_size", "use num_actors"),
        ("server_timeout", "timeout_s to find workers that hang"),
        ("num_workers_per_collector", "give create_env_fn as a list"),
    ]:
        with pytest.raises(TypeError, match=advice):
            take_stock_arguments({name: 7})
    with start([EchoEnv] * 3, marked(), num_executors=2, num_actors=2, timeout_s=60) as collector:
        assert sorted(collector.worker_pids()) == ["actor 0", "actor 1", "executor 0", "executor 1"]


def test_attributes() -> None:
    with start([EchoEnv] * 2, categorical(), num_actors=1) as collector:
        for name, advice in [
            ("out_buffer", r"batch\.clone\(\)\.zero_\(\) has its layout"),
            ("procs", r"worker_pids\(\) names them, and statistics\(\) tells of them"),
            ("policy_weights", r"use update_policy_weights_, and policy\.state_dict\(\)"),
            ("frames_per_worker", "use num_envs, sync_interval and frames_per_batch"),
            ("batch_size", "use num_envs, sync_interval and frames_per_batch"),
            ("running", r"use is_running\(\)"),
            ("policy_factory", "the attribute policy is what it made"),
            ("policy_version_tracker", "use policy_version"),
        ]:
            with pytest.raises(AttributeError, match=advice):
                getattr(collector, name)
        batch = next(iter(collector))
        assert not batch.clone().zero_()["observation"].any()
        assert collector.num_envs * collector.sync_interval == collector.frames_per_batch == 8
        assert collector.worker_pids()
        assert collector.statistics().frames == 8
        weights = {name: value + 1 for name, value in collector.policy.state_dict().items()}
        collector.update_policy_weights_(weights)
        assert not collector.is_running()
        assert collector.policy_version == 1
