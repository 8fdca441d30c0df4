"""What scripts read of TorchRL's collectors is there, or a sentence says what instead."""

from __future__ import annotations

import inspect
import re

import pytest
import torchrl.collectors as stock
from collectors import start
from environments import EchoEnv
from policies import categorical, marked

from torchrl_hts import HTSCollector
from torchrl_hts.collector.stock_attributes import ABSENT

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]

COLLECTORS = [stock.Collector, stock.MultiSyncCollector, stock.MultiAsyncCollector,
              stock.AsyncBatchedCollector]  # fmt: skip
# Of the base class, about profiling and what it sets for itself.
FREE = {"config"}


def collector() -> HTSCollector:
    return start([EchoEnv] * 2, total_frames=24)


def public_attributes(kind: type) -> set[str]:
    """Those of the class, and those that its methods set."""
    sources = {inspect.getmodule(b) for b in kind.__mro__ if b.__module__.startswith("torchrl")}
    found = {name for name in dir(kind) if not name.startswith("_")}
    for module in sources:
        found |= set(
            re.findall(r"\bself\.([a-z]\w*)\s*(?::[^=\n]+)?=[^=]", inspect.getsource(module))
        )
    return found - FREE


def test_every_attribute_is_there_or_explained() -> None:
    names = set().union(*map(public_attributes, COLLECTORS))
    with collector() as ours:
        check(ours, names)


def check(ours: HTSCollector, names: set[str]) -> None:
    missing = sorted({name for name in names if not hasattr(ours, name)} - ABSENT.keys())
    assert not missing, f"explain {missing} in stock_attributes.py"
    for name in ABSENT:
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': .") as caught:
            getattr(ours, name)
        assert len(str(caught.value).split()) <= 35


def test_what_trainers_of_sac_look_for_is_told() -> None:
    """With ``target_entropy="auto"`` they look for the spec of the actions."""
    with collector() as ours, pytest.raises(AttributeError, match=r"SACTrainer.*action_spec="):
        ours.getattr_env("full_action_spec_unbatched")


def test_unknown_attributes() -> None:
    said = r"^'HTSCollector' object has no attribute 'nonsense'$"
    with collector() as ours, pytest.raises(AttributeError, match=said):
        _ = ours.nonsense


def test_what_is_there() -> None:
    ours = collector()
    assert (ours.n_env, ours.num_workers) == (2, 2)
    assert ours.get_policy_version() == ours.policy_version == 1
    assert ours.get_model("policy") is ours.policy
    with pytest.raises(KeyError, match="one model"):
        ours.get_model("critic")
    assert ours.getattr_policy("in_keys") == ours.policy.in_keys
    assert ours.replay_buffer is None
    assert not ours.is_running()
    ours.increment_version()
    assert not ours.closed
    ours.shutdown()
    assert ours.closed


def test_a_pause_says_what_is_there_instead() -> None:
    with collector() as ours, pytest.raises(NotImplementedError, match="until you ask for the nex"):
        ours.pause()


def test_rollout_gives_the_next_batch() -> None:
    with collector() as ours, collector() as other:
        for batch in other:
            assert (ours.rollout() == batch).all()
        assert ours.rollout() is None


def test_reset_begins_new_episodes() -> None:
    with start([EchoEnv] * 2, marked()) as ours:
        before = next(iter(ours))["collector", "traj_ids"].flatten().tolist()
        with pytest.raises(TypeError, match="all environments are reset together"):
            ours.reset(index=[0])
        ours.reset()
        after = next(iter(ours))["collector", "traj_ids"].flatten().tolist()
        assert not set(before) & set(after)


def test_what_it_was_made_with() -> None:
    with start([EchoEnv], categorical(), max_frames_per_traj=3, compact_obs=True) as ours:
        assert ours.max_frames_per_traj == 3
        assert ours.compact_obs
        assert not ours.set_truncated
