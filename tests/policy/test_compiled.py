"""Compiled policies act as they were written; what actors can't run is refused with what works."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import EchoEnv
from policies import categorical
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule, TensorDictModule
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchrl.modules import ProbabilisticActor

from torchrl_hts import DelayedGradient, Evaluator, HTSCollector


class Net(nn.Module):
    """Logits of three actions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, observation: Tensor) -> Tensor:
        logits: Tensor = self.layer(torch.tanh(observation.float()))
        return logits


class CompiledInside(Net):
    """Its own method is compiled."""

    @torch.compile(backend="eager")
    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(observation)


def actor(net: Any = None) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(Net() if net is None else net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def in_place() -> ProbabilisticActor:
    policy = seeded(actor)
    policy.compile(backend="eager")
    return policy


def never(graph: Any, inputs: Any) -> Any:
    raise AssertionError("compiled by a worker")


def graph_of(module: Any) -> Any:
    """As its constructor makes it, but for what that does to the whole process."""
    graph = object.__new__(CudaGraphModule)
    graph.module = module
    return graph


WAYS = {
    "policy": lambda: torch.compile(seeded(actor), backend="eager"),
    "network": lambda: actor(torch.compile(seeded(Net), backend="eager")),
    "in place": in_place,
    "method": lambda: actor(seeded(CompiledInside)),
    "inductor": lambda: torch.compile(seeded(actor)),
    "never": lambda: torch.compile(seeded(actor), backend=never),
}


def collect(policy: nn.Module, **options: Any) -> TensorDict:
    with HTSCollector(
        [EchoEnv] * 3, policy, frames_per_batch=12, total_frames=36, lag=0, seed=0, **options
    ) as collector:
        batches = []
        for batch in collector:
            batches.append(batch.exclude("collector"))
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.5)
        return torch.cat(batches, 1)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_the_policy_as_it_was_written(way: str) -> None:
    plain, found = collect(seeded(actor)), collect(WAYS[way]())
    for key, value in plain.items(True, True):
        assert torch.equal(value, found[key]), key


@pytest.mark.usefixtures("nothing_left")
def test_a_plain_network_that_is_compiled() -> None:
    class Acts(nn.Module):
        def forward(self, observation: Tensor) -> Tensor:
            return observation[..., 0].long() % 3

    assert (collect(torch.compile(Acts(), backend="eager"))["action"] < 3).all()


@pytest.mark.usefixtures("nothing_left")
def test_weights_go_by_either_name() -> None:
    plain = seeded(actor)
    policy = torch.compile(seeded(actor), backend="eager")
    with HTSCollector([EchoEnv], policy, frames_per_batch=4, seed=0) as collector:
        for weights in (plain, policy, plain.state_dict(), policy.state_dict()):
            collector.update_policy_weights_(weights)
        state = collector.state_dict()
    with HTSCollector([EchoEnv], policy, frames_per_batch=4, seed=0) as collector:
        collector.load_state_dict(state)
        next(iter(collector))


@pytest.mark.usefixtures("nothing_left")
def test_it_learns_compiled_and_is_evaluated() -> None:
    policy = torch.compile(seeded(actor), backend="eager")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in policy.parameters()]
    with HTSCollector(
        [EchoEnv] * 2, policy, frames_per_batch=8, total_frames=24, seed=0
    ) as collector:
        delayed = DelayedGradient(policy)
        for batch in collector:
            with delayed(batch):
                optimizer.zero_grad()
                logits = policy(batch.clone())["logits"]
                (logits.log_softmax(-1)[..., 0]).mean().backward()
                optimizer.step()
    assert not all(map(torch.equal, before, policy.parameters()))
    with Evaluator(EchoEnv, policy, num_episodes=2) as evaluator:
        evaluator.submit(0)
        policy.load_state_dict(dict(evaluator.wait()[0].parameters))


def exported() -> torch.export.ExportedProgram:
    """What `torch.export` makes of a network."""
    return torch.export.export(Net(), (torch.zeros(2, 4),))


def three(rows: torch.Tensor) -> torch.Tensor:
    return rows[..., :3].float()


def test_a_scripted_function_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        policy = torch.jit.script(three)
    with pytest.raises(TypeError, match=r"the policy is .*\(ScriptFunction\).*give what was scr"):
        HTSCollector([EchoEnv], policy, frames_per_batch=4)


def test_an_exported_program_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the policy was made by torch.export \(ExportedProgram\)"):
        HTSCollector([EchoEnv], exported(), frames_per_batch=4)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (
            lambda: torch.jit.script(nn.Linear(4, 3)),
            r"part 'module.0.module' is a torch.jit module",
        ),
        (lambda: torch.jit.trace(Net(), torch.zeros(2, 4)), "torch.jit module .*was scripted"),
        (lambda: torch.jit.script(three), r"part of .*torch.jit .*\(ScriptFunction\)"),
        (lambda: nn.DataParallel(Net()), "wrapped in DataParallel.*its .module"),
        (
            lambda: exported().module(),
            r"part 'module.0.module' was made by torch.export .*give the nn.Module that was",
        ),
        (lambda: torch.export.unflatten(exported()), r"part .* was made by torch.export"),
    ],
)
def test_parts_that_are_refused(wrap: Any, said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        policy = actor(wrap())
    with pytest.raises(TypeError, match=said) as raised:
        HTSCollector([EchoEnv], policy, frames_per_batch=4)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "inside", [nn.DataParallel(Net()).module, Net(), graph_of(Net()).module], ids=repr
)
def test_what_was_wrapped_acts_in_its_place(inside: nn.Module) -> None:
    assert collect(actor(inside)).shape == (3, 12)


def test_sharded_policies_are_refused_and_whole_values_can_be_staged(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    said = r"sharded \(.*FSDP.*before it was sharded.* with update_policy_weights_"
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        whole = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
        with pytest.raises(TypeError, match=said.replace("FSDP", "FullySharded")):
            HTSCollector([EchoEnv], actor(whole), frames_per_batch=4)
        net = seeded(Net)
        sharded = deepcopy(net)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=said):
            HTSCollector([EchoEnv], actor(sharded), frames_per_batch=4)
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.fill_(0.5)
        with HTSCollector([EchoEnv], actor(net), frames_per_batch=4, lag=0) as collector:
            staged = actor(sharded).named_parameters()
            collector.update_policy_weights_({n: p.full_tensor() for n, p in staged})
            batch = next(iter(collector))
        assert (batch["logits"] == batch["logits"][..., :1]).all()
    finally:
        distributed.destroy_process_group()


def test_graphs_are_refused_and_what_they_wrap_works() -> None:
    graph = graph_of(categorical())
    with pytest.raises(TypeError, match=r"CudaGraphModule.*policy\.module"):
        HTSCollector([EchoEnv], graph, frames_per_batch=4)
    inside = TensorDictModule(graph_of(Net()), ["observation"], ["logits"])
    with pytest.raises(TypeError, match="holds a CudaGraphModule"):
        HTSCollector([EchoEnv], inside, frames_per_batch=4)
    assert collect(graph.module).shape == (3, 12)


def test_the_advice_for_compile_policy_works() -> None:
    with pytest.raises(TypeError, match=r"leave it out: .*torch.compile\(policy\)"):
        HTSCollector([EchoEnv], categorical(), frames_per_batch=4, compile_policy=True)
    with pytest.raises(TypeError, match="CUDA graphs are for the learner"):
        HTSCollector([EchoEnv], categorical(), frames_per_batch=4, cudagraph_policy=True)
    policy = categorical()
    compiled = torch.compile(policy, backend="eager")
    data = collect(policy)
    assert compiled(data.clone())["logits"].shape == (3, 12, 3)
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in policy.parameters()}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_parametrized_policies_run(wrap: Any) -> None:
    """I7: and their weights, which are computed anew in each pass, follow the learner's."""

    def make() -> ProbabilisticActor:
        net = seeded(Net)
        wrap(net.layer)
        return actor(net).eval()

    one, two = collect(make(), num_executors=1), collect(make(), num_executors=3, num_actors=2)
    assert torch.equal(one["logits"], two["logits"])
    policy = make()
    with torch.no_grad():
        first = policy(one[:, :4].select("observation"))["logits"]
    torch.testing.assert_close(first, one["logits"][:, :4])
