"""Inputs of trial runs: rows repeated and permuted, and kinds that a policy refuses passed over."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from torchrl_hts._policy.trial_inputs import TrialInputs


def test_rows_are_repeated_and_permuted() -> None:
    codes = torch.arange(5)[:, None]
    state = torch.zeros(5, 2)
    real = TensorDict({"codes": codes.repeat(1, 3) * torch.tensor([1, 2, 3]), "h": state}, [5])
    made_up = TensorDict({"codes": torch.randint(99, (40, 3)), "h": torch.randn(40, 2)}, [40])
    trial = TrialInputs(real, 3, made_up, added=(("h",),))
    assert sorted(trial.rows(12)["codes"][:, 0].bincount().tolist()) == [2, 2, 2, 3, 3]
    first, with_real, shuffled, resets = trial.kinds()
    assert (first == made_up).all()
    assert set(with_real["codes"][:, 0].tolist()) == {0, 1, 2}, "of resets alone"
    assert (with_real["h"] == made_up["h"]).all()
    assert (shuffled["codes"].sort(1).values == resets["codes"]).all()
    assert len({tuple(row) for row in shuffled["codes"].tolist()}) > 8
    assert not resets["h"].any()


def test_kinds_that_are_refused_are_passed_over() -> None:
    real = TensorDict({"codes": torch.ones(2, 3, dtype=torch.int64)}, [2])
    trial = TrialInputs(real, 2, TensorDict({"codes": torch.randint(2, 99, (8, 3))}, [8]))

    def run(inputs: Any) -> Any:
        return nn.Embedding(2, 1)(inputs["codes"])

    accepted = trial.accepted_by(run)
    assert (accepted.passed_over, accepted.num_kinds, len(list(accepted.kinds()))) == (1, 3, 3)
    assert trial.accepted_by(lambda _: None).passed_over == 0
    assert trial.accepted_by(lambda inputs: inputs["none"]).num_kinds == 1, "the run will tell"
