"""Where the package and the recipes unpickle: never what comes from a file."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_unpickles_what_comes_from_a_file() -> None:
    """What is unpickled as it is came from this process, or one that it has started."""
    found = set()
    for path in [*ROOT.glob("torchrl_hts/**/*.py"), *ROOT.glob("recipes/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                *("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"),
                *("pickle.Unpickler", "unpickled", "torch.load", "np.load", "numpy.load"),
            ):
                found.add((str(path.relative_to(ROOT)), ast.unparse(node)))
    assert {name for name, call in found if "weights_only=True" not in call} == {
        "torchrl_hts/_actor/batch_inference.py",  # inputs of the policy
        "torchrl_hts/_actor/random_rounds.py",  # what draws actions
        "torchrl_hts/_actor/slot_policies.py",  # the policy
        "torchrl_hts/env_state/ale.py",  # what a fork of this process says
        "torchrl_hts/_planning/batch_transforms.py",  # copies of transforms, made just before
        "torchrl_hts/_world/group.py",  # what other learners say
        "torchrl_hts/_planning/planner.py",  # a copy of the policy, made in the same place
        "torchrl_hts/bench/measuring.py",  # likewise
        "torchrl_hts/_evaluation/evaluator.py",  # likewise
        "torchrl_hts/_executor/copied_env.py",  # the environment, copied just before
        "torchrl_hts/_executor/making.py",  # the factory
        "torchrl_hts/_executor/factories.py",  # the transforms around a batched environment
        "torchrl_hts/_processes/messages.py",  # between a process and its workers
        "torchrl_hts/_planning/pass_times.py",  # the policy and inputs of it
        "torchrl_hts/_planning/pickling.py",  # a copy of the policy, made just before
        "torchrl_hts/_evaluation/player.py",  # the factory and the policy, from the evaluator
        "torchrl_hts/_planning/probe.py",  # the factory
        "torchrl_hts/_processes/registrations.py",  # what the main process has registered
        "torchrl_hts/envs/remote.py",  # between an executor and the actor that it has started
        "torchrl_hts/envs/simulator.py",  # the same, on the actor's side
    }
