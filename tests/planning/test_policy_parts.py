"""Refused: networks that a policy runs and has not registered, and tensors that no slot holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collectors import collect
from environments import EchoEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torch import distributions as D
from torch.optim.swa_utils import AveragedModel
from torchrl.modules import MultiAgentMLP, ProbabilisticActor

from torchrl_hts import Evaluator, HTSCollector
from torchrl_hts._planning.policy_parts import check_tensors, refused_strangers

pytestmark = pytest.mark.usefixtures("nothing_left")

GLOBAL = nn.Linear(4, 3)


class AnyType(nn.Linear):
    """Takes observations of any data type."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.float())


class Listed(nn.Module):
    """Keeps its layers in a list of Python's."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = list(layers)

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


class Aside(nn.Module):
    """Has something beside its network."""

    def __init__(self, network: nn.Module, **aside: Any) -> None:
        super().__init__()
        self.network = network
        vars(self).update(aside)

    def forward(self, rows: Tensor) -> Tensor:
        return self.network(rows)


class Both(nn.Module):
    """Its layer is registered, and in a list too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.layers = layer, [layer]

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers[0](rows)


class Weighted(nn.Module):
    """Keeps a parameter in a list of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(3, 4))]

    def forward(self, rows: Tensor) -> Tensor:
        return rows.float() @ self.weights[0].T


class InClass(nn.Module):
    """Keeps its network as an attribute of the class."""

    nets = [nn.Linear(4, 3)]  # noqa: RUF012

    def forward(self, rows: Tensor) -> Tensor:
        return self.nets[0](rows)


class Named(nn.Module):
    """Runs a global network."""

    def forward(self, rows: Tensor) -> Tensor:
        return GLOBAL(rows)


class CallsGlobal:
    """A callable that runs a global network."""

    def __call__(self, rows: Tensor) -> Tensor:
        return GLOBAL(rows)


class Agent(nn.Module):
    """As in CleanRL: another method than forward acts."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(4, 3)

    def act(self, rows: Tensor) -> Tensor:
        return self.network(rows)


class Ensemble(nn.Module):
    """Calls a network with parameters of its own, as `torch.func` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))
        self.template = [nn.Linear(4, 3)]

    def forward(self, rows: Tensor) -> Tensor:
        values = {"weight": self.weight, "bias": self.bias}
        return torch.func.functional_call(self.template[0], values, rows)


def beside_itself() -> nn.Module:
    """A network that is registered, and run by a function too, of which actors get a copy."""
    network = nn.Linear(4, 4)
    return nn.Sequential(network, Aside(calling(network)), nn.Linear(4, 3))


def actor(network: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=D.Categorical,
        return_log_prob=True,
    )


def run(policy: TensorDictModuleBase) -> None:
    with refused_strangers(policy):
        policy(TensorDict({"observation": torch.zeros(5, 4)}, [5]))


def calling(network: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda rows: network(rows)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: calling(nn.Linear(4, 3)), r"Linear .*\(policy.module.0.module: .*'network'\)"),
        (lambda: lambda rows: GLOBAL(rows), r"Linear .*the global 'GLOBAL'\)"),
        (lambda: Listed(nn.Linear(4, 4), nn.Linear(4, 3)), r"Linear .*module.layers\[0\]\)"),
        (lambda: Aside(calling(GLOBAL)), r"Linear .*module.network: its variable 'network'\)"),
        (lambda: Agent().act, r"Agent .*\(policy.module.0.module.__self__\)"),
        (lambda: calling(Agent().act), r"Agent .*'network'.__self__\)"),  # type: ignore[arg-type]
        (lambda: lambda rows: nn.functional.linear(rows, GLOBAL.weight), r"Linear .*'GLOBAL'\)"),
        (InClass, r"Linear .*nets\[0\]\)"),
        (Named, r"Linear .*forward: the global 'GLOBAL'\)"),
        (CallsGlobal, r"Linear .*__call__: the global 'GLOBAL'\)"),
        (Weighted, r"Parameter .*weights\[0\]\)"),
    ],
)
def test_networks_that_are_not_registered(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(TypeError, match=f"the policy uses a {named}: actors would keep the copy"):
        run(actor(make()))


def frozen() -> nn.Module:
    return nn.Linear(4, 3).requires_grad_(False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Aside(nn.Linear(4, 3), critic=[nn.Linear(4, 1)]),  # which it doesn't run
        lambda: Listed(frozen()),  # which nobody trains
        lambda: Both(nn.Linear(4, 3)),
        Ensemble,
        lambda: Aside(nn.Linear(4, 3), kept=[nn.Parameter(torch.ones(3))]),
        lambda: nn.Sequential(
            nn.Unflatten(-1, (1, 4)),
            MultiAgentMLP(4, 3, 1, centralized=False, share_params=False),
            nn.Flatten(-2),
        ),
    ],
)
def test_networks_that_need_not_be(make: Callable[[], nn.Module]) -> None:
    run(actor(make()))


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_advice(evaluates: bool) -> None:
    """The module itself instead of a function that calls it: learning reaches it."""
    network = AnyType(4, 3)
    wrong = actor(calling(network))
    with pytest.raises(TypeError, match="or give TensorDictModule the module itself"):
        Evaluator(EchoEnv, wrong) if evaluates else collect([EchoEnv], wrong)
    policy = actor(network)
    if evaluates:
        Evaluator(EchoEnv, policy, num_episodes=1).shutdown()
        return
    with HTSCollector([EchoEnv], policy, frames_per_batch=4, lag=0, seed=0) as collector:
        batches = iter(collector)
        next(batches)
        with torch.no_grad():
            network.weight.mul_(3)
        batch = next(batches)
    torch.testing.assert_close(network(batch["observation"]), batch["logits"])


def with_buffer(value: Tensor) -> ProbabilisticActor:
    network = AnyType(4, 3)
    network.register_buffer("extra", value)
    return actor(network)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: torch.eye(2).to_sparse(), TypeError, "layout torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), TypeError, "layout torch.sparse_csr"),
        (lambda: torch.zeros(2).to(torch.float8_e5m2), TypeError, "torch.float8_e5m2"),
        (lambda: torch.zeros(2, dtype=torch.complex32), TypeError, "torch.complex32"),
        (lambda: torch.zeros(2).to(torch.uint16), TypeError, "torch.uint16"),
        (
            lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
            TypeError,
            "torch.qint8",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
            TypeError,
            "layout nested",
        ),
        (lambda: torch.zeros(2, device="meta"), ValueError, "meta device.*to_empty"),
    ],
)
def test_tensors_that_no_slot_holds(
    make: Callable[[], Tensor], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=rf"the policy's buffer 'module.0.module.extra' is .*{said}"):
        HTSCollector([EchoEnv], with_buffer(make()), frames_per_batch=4)


def test_every_common_type_has_a_place() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.complex64, torch.bool):
        check_tensors(with_buffer(torch.zeros(2, dtype=dtype)))


def test_an_output_that_no_slot_holds() -> None:
    class Short(nn.Module):
        def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros(len(rows), 3), torch.zeros(len(rows)).to(torch.float8_e5m2)

    policy = ProbabilisticActor(
        TensorDictModule(Short(), ["observation"], ["logits", "short"]),
        in_keys=["logits"],
        distribution_class=D.Categorical,
    )
    with pytest.raises(TypeError, match=r"the entry 'short' is .*float8_e5m2.*of a common type"):
        collect([EchoEnv], policy)


def test_an_averaged_policy() -> None:
    averaged = AveragedModel(actor(AnyType(4, 3)))
    with pytest.raises(TypeError, match="AveragedModel around a policy: give the one within, its"):
        HTSCollector([EchoEnv], averaged, frames_per_batch=4)
    collect([EchoEnv], averaged.module)
    collect([EchoEnv], actor(AveragedModel(AnyType(4, 3))))
