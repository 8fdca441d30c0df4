"""Which weights act in which round: whatever form they are given in, and whenever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environments import echo
from policies import marked
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from torchrl_hts import HTSCollector

pytestmark = pytest.mark.usefixtures("nothing_left")


class TestWeights:
    """Which parameters are staged."""

    def test_explicit_weights_stay_until_the_next_call(self) -> None:
        policy, other = marked(), marked()
        other.module.mark.data.fill_(7)
        with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
            batches = iter(collector)
            next(batches)
            collector.update_policy_weights_(other)
            assert next(batches)["mark"].unique().item() == 7
            assert next(batches)["mark"].unique().item() == 7
            collector.update_policy_weights_()
            assert next(batches)["mark"].unique().item() == 0

    @pytest.mark.parametrize("lag", [0, 1, 2])
    def test_the_newest_values_act_whenever_it_is_called(self, lag: int) -> None:
        """Scripts of TorchRL call it before an update; rounds are no older for that."""
        policy = marked()
        with HTSCollector([echo()], policy, frames_per_batch=4, lag=lag) as collector:
            batches = iter(collector)
            next(batches)
            for value in (1, 2, 3):
                collector.update_policy_weights_()
                policy.module.mark.data.fill_(value)
                assert next(batches)["mark"].unique().item() == max(0, value - lag)

    def test_others_are_copied_and_saved_while_a_batch_is_out(self) -> None:
        policy, other = marked(), marked()
        other.module.mark.data.fill_(3)
        with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
            next(iter(collector))
            collector.update_policy_weights_(other)
            other.module.mark.data.fill_(4)
            state = collector.state_dict()
        with HTSCollector([echo()], marked(), frames_per_batch=4, lag=0) as collector:
            collector.load_state_dict(state)
            batches = iter(collector)
            assert [next(batches)["mark"].unique().item() for _ in range(2)] == [3, 3]

    def test_states_of_before_have_values_that_are_not_kept(self) -> None:
        """They were of the policy, fixed by a call of ``update_policy_weights_()``."""
        policy = marked()
        policy.module.mark.data.fill_(3)
        with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
            next(iter(collector))
            collector.update_policy_weights_(policy.state_dict() | {"module.mark": torch.ones(())})
            state = collector.state_dict()
        state["staged_parameters"]["keep"] = False
        with HTSCollector([echo()], marked(), frames_per_batch=4, lag=0) as collector:
            collector.load_state_dict(state)
            assert next(iter(collector))["mark"].unique().item() == 3

    def test_any_form_of_weights(self) -> None:
        policy, other = marked(), marked()
        other.module.mark.data.fill_(7)
        forms = [other, TensorDict.from_module(other), other.state_dict()]
        with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
            batches = iter(collector)
            next(batches)
            for k, weights in enumerate(forms):
                other.module.mark.data.fill_(7 + k)
                collector.update_policy_weights_(weights)
                assert next(batches)["mark"].unique().item() == 7 + k

    def test_weights_of_a_part_of_the_policy(self) -> None:
        """Its names are others, and its tensors the policy's own, as those of a trainer are."""
        part = marked()
        policy = TensorDictSequential(part, TensorDictModule(torch.neg, ["mark"], ["less"]))
        with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
            batches = iter(collector)
            next(batches)
            part.module.mark.data.fill_(7)
            collector.update_policy_weights_(TensorDict.from_module(part))
            assert next(batches)["mark"].unique().item() == 7
            with pytest.raises(KeyError, match=r"no parameter or buffer 'module.count'"):
                collector.update_policy_weights_(TensorDict.from_module(marked()))

    def test_weights_of_what_wraps_the_policy(self) -> None:
        """Averaged, or data parallel: its names have a level more."""
        policy, other = marked(), marked()
        averaged = torch.optim.swa_utils.AveragedModel(other)
        parallel = {f"module.{name}": value for name, value in other.state_dict().items()}
        forms = [averaged, averaged.state_dict(), TensorDict.from_module(averaged), parallel]
        with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
            batches = iter(collector)
            next(batches)
            for k, weights in enumerate(forms):
                for mark in (averaged.module.module.mark, other.module.mark):
                    mark.data.fill_(7 + k)
                collector.update_policy_weights_(weights)
                assert next(batches)["mark"].unique().item() == 7 + k
            with pytest.raises(KeyError, match=r"no parameter or buffer 'module.nothing'"):
                collector.update_policy_weights_(
                    {**parallel, "module.module.nothing": torch.ones(1)}
                )

    def test_weights_of_a_policy_that_uses_a_module_twice(self) -> None:
        """State dicts and TensorDicts have its parameters under each of their names."""

        def tied() -> TensorDictModule:
            policy = marked()
            policy.again = policy.module
            return policy

        policy, other = tied(), tied()
        assert {"module.mark", "again.mark"} <= other.state_dict().keys()
        with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
            batches = iter(collector)
            next(batches)
            for k, weights in enumerate([other.state_dict(), TensorDict.from_module(other)]):
                other.module.mark.data.fill_(7 + k)
                collector.update_policy_weights_(weights)
                assert next(batches)["mark"].unique().item() == 7 + k
            # Its own are no others: they don't stay in force.
            collector.update_policy_weights_(policy.state_dict())
            assert next(batches)["mark"].unique().item() == 0
            policy.module.mark.data.fill_(3)
            assert next(batches)["mark"].unique().item() == 3

    def test_weights_by_model(self) -> None:
        """As TorchRL's collectors take them, where there is but one model."""
        other = marked()
        other.module.mark.data.fill_(7)
        with HTSCollector([echo()], marked(), frames_per_batch=4, lag=0) as collector:
            batches = iter(collector)
            next(batches)
            collector.update_policy_weights_(weights_dict={"policy": other})
            assert next(batches)["mark"].unique().item() == 7
            with pytest.raises(KeyError, match=r"weights_dict must be .*critic"):
                collector.update_policy_weights_(weights_dict={"policy": other, "critic": other})
            for name, value in (("weights", {}), ("policy", other), ("model_id", "policy")):
                with pytest.raises(ValueError, match=f"either weights_dict or {name}, not both"):
                    collector.update_policy_weights_(
                        weights_dict={"policy": other}, **{name: value}
                    )
            with pytest.raises(TypeError, match="all actors act with the parameters of the round"):
                collector.update_policy_weights_(other, worker_ids=0)
            for weights in ({0: other.state_dict()}, "policy", 3):
                with pytest.raises(TypeError, match="a dict of tensors by name, the same for all"):
                    collector.update_policy_weights_(weights)
            with pytest.raises(TypeError, match="unexpected keyword argument 'weigths'"):
                collector.update_policy_weights_(weigths={})

    def test_the_old_name_of_weights(self) -> None:
        other = marked()
        other.module.mark.data.fill_(7)
        weights = TensorDict.from_module(other)
        with HTSCollector([echo()], marked(), frames_per_batch=4, lag=0) as collector:
            batches = iter(collector)
            next(batches)
            with pytest.warns(DeprecationWarning, match="give policy_or_weights"):
                collector.update_policy_weights_(policy_weights=weights)
            assert next(batches)["mark"].unique().item() == 7
            with (
                pytest.warns(DeprecationWarning, match="policy_weights is deprecated"),
                pytest.raises(ValueError, match="give either policy_or_weights or policy_weights"),
            ):
                collector.update_policy_weights_(other, policy_weights=weights)

    def test_unknown_and_misshapen_weights(self) -> None:
        with HTSCollector([echo()], marked(), frames_per_batch=4) as collector:
            with pytest.raises(KeyError, match="no parameter or buffer 'x'"):
                collector.update_policy_weights_({"x": torch.zeros(())})
            with pytest.raises(ValueError, match=r"shape \(2,\)"):
                collector.update_policy_weights_({"module.mark": torch.zeros(2)})
            with pytest.raises(KeyError, match="model_id='critic'"):
                collector.update_policy_weights_(model_id="critic")


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.register_parameter("more", torch.nn.Parameter(torch.ones(2))),
        lambda net: net.register_parameter("mark", torch.nn.Parameter(torch.ones(1, 1))),
        lambda net: net.double(),
    ],
    ids=["another", "of another shape", "of another type"],
)
def test_parameters_that_change_their_form(change: Callable[[torch.nn.Module], Any]) -> None:
    policy = marked()
    with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
        batches = iter(collector)
        next(batches)
        change(policy.module)
        with pytest.raises(
            RuntimeError,
            match=r"collector was made \(module\.(mark|more|count, module\.mark)\): write v",
        ):
            next(batches)


class Heads(torch.nn.Module):
    """Writes what its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.up.bias, 1)
        torch.nn.init.constant_(self.down.bias, -1)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        up, down = self.up.bias.expand(len(rows), 1), self.down.bias.expand(len(rows), 1)
        return torch.zeros(len(rows), dtype=torch.long), up, down


def reorder(heads: Heads) -> None:
    up = heads.up
    del heads.up
    heads.up = up


@pytest.mark.parametrize(
    "change", [reorder, lambda heads: setattr(heads, "up", torch.compile(heads.up))]
)
def test_parts_that_are_registered_anew_or_compiled(change: Callable[[Any], None]) -> None:
    policy = TensorDictModule(Heads(), ["observation"], ["action", "up", "down"])
    with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
        batches = iter(collector)
        next(batches)
        change(policy.module)
        with torch.no_grad():
            policy.module.up.bias.fill_(3)
        batch = next(batches)
        assert batch["up"].unique().tolist() == [3]
        assert batch["down"].unique().tolist() == [-1]


def test_parameters_that_are_replaced() -> None:
    policy = marked()
    with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
        batches = iter(collector)
        next(batches)
        policy.module.mark = torch.nn.Parameter(torch.full_like(policy.module.mark, 5))
        assert next(batches)["mark"].unique().item() == 5


def test_weights_given_before_the_first_batch_act_from_round_0() -> None:
    other = marked()
    other.module.mark.data.fill_(7)
    with HTSCollector([echo()], policy_factory=marked, frames_per_batch=4, lag=1) as collector:
        collector.update_policy_weights_(other)
        batches = iter(collector)
        assert [next(batches)["mark"].unique().item() for _ in range(3)] == [7, 7, 7]


def test_values_staged_before_the_first_batch_do_not_outlive_it() -> None:
    policy = marked()
    with HTSCollector([echo()], policy, frames_per_batch=4, lag=0) as collector:
        collector.update_policy_weights_()
        batches = iter(collector)
        next(batches)
        policy.module.mark.data.fill_(3)
        assert next(batches)["mark"].unique().item() == 3
