"""Every argument of TorchRL's collectors is taken, or explained in one sentence."""

from __future__ import annotations

import inspect
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.collectors
import torchrl.collectors.distributed
from environments import EchoEnv
from policies import categorical
from torchrl.collectors import BaseCollector

from torchrl_hts import HTSCollector
from torchrl_hts.collector.stock_arguments import STOCK_ARGUMENTS, Stock, take_stock_arguments

pytestmark = pytest.mark.timeout(60)

PAGE = (Path(__file__).parents[2] / "docs/how_to/coming_from_torchrl.md").read_text()
OURS = set(inspect.signature(HTSCollector.__init__).parameters) - {"self", "stock_arguments"}
TAKEN = (set(Stock.__dataclass_fields__) - {"copies"}) | {"num_workers", "num_collectors"}


def stock_collectors() -> list[type[BaseCollector]]:
    found = {
        value
        for module in (torchrl.collectors, torchrl.collectors.distributed)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, BaseCollector)
    }
    return sorted(found, key=lambda collector: collector.__name__)


def arguments(collector: type[BaseCollector]) -> dict[str, Any]:
    """Its arguments, with their defaults."""
    parameters = inspect.signature(collector.__init__).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: p.default for p in parameters if p.kind not in kinds and p.name != "self"}


def collect(**kwargs: Any) -> torch.Tensor:
    """The first batch of two environments."""
    kwargs = {"frames_per_batch": 8, "total_frames": 8, "seed": 0} | kwargs
    with HTSCollector([EchoEnv] * 2, categorical(), **kwargs) as collector:
        (batch,) = collector
    return batch


@pytest.mark.parametrize("collector", stock_collectors(), ids=lambda c: c.__name__)
class TestEveryArgument:
    def test_is_known(self, collector: type[BaseCollector]) -> None:
        unknown = arguments(collector).keys() - OURS - TAKEN - STOCK_ARGUMENTS.keys()
        assert not unknown, f"explain {sorted(unknown)} in stock_arguments.py"

    def test_is_harmless_at_its_default(self, collector: type[BaseCollector]) -> None:
        defaults = arguments(collector)
        take_stock_arguments({k: v for k, v in defaults.items() if k not in OURS})

    def test_has_a_row_in_the_docs(self, collector: type[BaseCollector]) -> None:
        for name in arguments(collector):
            (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", PAGE, re.MULTILINE)
            if name in OURS | TAKEN:
                assert row.startswith("taken"), name
            elif STOCK_ARGUMENTS[name].any_value:
                assert row == f"no effect: {STOCK_ARGUMENTS[name].why}"
            else:
                assert row == f"refused: {STOCK_ARGUMENTS[name].why}"


def test_all_defaults_of_multi_sync_collector_at_once() -> None:
    from torchrl.collectors import MultiSyncCollector

    given = arguments(MultiSyncCollector)
    kept = {k: v for k, v in given.items() if k not in ("create_env_fn", "policy")}
    assert collect(**kept | {"frames_per_batch": 8, "total_frames": 8}).shape == (2, 4)


def test_every_sentence_says_what_was_given_and_something_else_to_do() -> None:
    for name, argument in STOCK_ARGUMENTS.items():
        assert len(argument.why.split()) <= 40, name
        if not argument.any_value:
            with pytest.raises(TypeError, match=f"^HTSCollector does not take {name}: .") as caught:
                take_stock_arguments({name: object()})
            assert "\n" not in str(caught.value)


def test_the_values_that_scripts_for_other_collectors_pass() -> None:
    stock: dict[str, Any] = {
        "auto_register_policy_transforms": True, "trust_policy": True, "no_cuda_sync": True,
        "backend": "mp", "reset_when_done": True, "update_at_each_batch": True, "sync": True,
        "track_traj_ids": True, "num_workers": 2, "worker_idx": 3, "init_random_frames": -1,
        "max_frames_per_traj": -1, "use_buffers": True, "extend_buffer": True,
        "split_trajs": None, "num_sub_threads": 1,
    }  # fmt: skip
    batch = collect(**stock)
    assert (batch == collect()).all()


@pytest.mark.parametrize(("name", "value"), [("total_frames", 16.0), ("frames_per_batch", 8.0)])
def test_counts_may_be_floats_without_a_fraction(name: str, value: float) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 16} | {name: value}
    with HTSCollector([EchoEnv] * 2, categorical(), **kwargs) as collector:
        assert [batch.shape for batch in collector] == [(2, 4)] * 2
        assert type(collector.total_frames) is int
        assert type(collector.frames_per_batch) is int


@pytest.mark.parametrize("value", [16.5, float("nan"), -float("inf"), "16"])
@pytest.mark.parametrize("name", ["total_frames", "frames_per_batch"])
def test_other_counts_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be an int"):
        collect(**{name: value})


def test_infinitely_many_frames_are_an_endless_run() -> None:
    """As TorchRL's collectors take it, and have it as their attribute."""
    with HTSCollector(EchoEnv, categorical(), frames_per_batch=4, total_frames=inf) as collector:
        assert collector.total_frames == inf
        assert next(iter(collector)).shape == (4,)
        with pytest.raises(TypeError, match="an endless collector"):
            len(collector)


def test_a_length_of_minus_one_means_never() -> None:
    batch = collect(max_frames_per_traj=-1)
    assert "step_count" not in batch.keys()
    assert (batch == collect()).all()


@pytest.mark.parametrize("cat_results", [0, -1])
def test_results_are_concatenated_as_multi_sync_collector_does(cat_results: int) -> None:
    flat, stacked = collect(cat_results=cat_results), collect(cat_results="stack")
    assert flat.shape == (8,)
    assert flat.names == ["time"]
    assert (flat == stacked.reshape(-1)).all()  # environment by environment, in time order


def test_concatenated_batches_can_be_split_and_postprocessed() -> None:
    seen = []
    batch = collect(cat_results=-1, split_trajs=True, postproc=lambda b: seen.append(b) or b)
    assert seen == [batch]
    assert (batch == collect(split_trajs=True)).all()


@pytest.mark.parametrize("value", ["cat", 1, True, 0.5])
def test_other_ways_to_concatenate_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^cat_results must be 'stack', 0 or -1, got "):
        collect(cat_results=value)


@pytest.mark.parametrize("name", ["num_workers", "num_collectors"])
def test_one_factory_is_copied(name: str) -> None:
    with HTSCollector(EchoEnv, categorical(), frames_per_batch=12, **{name: 3.0}) as collector:
        assert collector.num_envs == 3
        assert next(iter(collector)).shape == (3, 4)


def test_a_list_must_have_as_many_factories_as_there_are_workers() -> None:
    with pytest.raises(ValueError, match="num_workers=3, but create_env_fn lists 2 environments"):
        collect(num_workers=3)


@pytest.mark.parametrize("num_executors", [1, 2])
def test_init_fn_is_called_once_in_each_executor(tmp_path: Path, num_executors: int) -> None:
    path = str(tmp_path / "calls")

    def write_a_line() -> None:
        with open(path, "a") as file:
            file.write("called\n")

    collect(init_fn=write_a_line, num_executors=num_executors)
    assert Path(path).read_text() == "called\n" * num_executors


def test_init_fn_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"^init_fn must be callable, got 3$"):
        collect(init_fn=3)


def test_all_that_are_refused_are_told_at_once() -> None:
    said = r"does not take interruptor: .*; nor num_threads: .*for the learner$"
    with pytest.raises(TypeError, match=said):
        take_stock_arguments({"interruptor": object(), "sync": True, "num_threads": 9})
