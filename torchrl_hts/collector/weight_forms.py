"""The forms in which ``update_policy_weights_`` takes weights, as in TorchRL's collectors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["the_weights"]


def the_weights(
    forms: Mapping[str, Any],
    *,
    weights_dict: Any = None,
    worker_ids: Any = None,
    model_id: str | None = None,
) -> Any:
    """What is given, in whichever form; None if nothing is.

    Args:
        forms: the others, by name, of which at most one is not None.
        weights_dict: ``{"policy": weights}``.
        worker_ids: refused.
        model_id: not beside a dict.

    Raises:
        TypeError: for ``worker_ids``.
        KeyError: for a dict of other models.
        ValueError: for two forms at once.
    """
    if worker_ids is not None:
        raise TypeError(
            "HTSCollector does not take worker_ids: all actors act with the parameters of the round"
        )
    given = {name: value for name, value in forms.items() if value is not None}
    if weights_dict is not None:
        if not isinstance(weights_dict, Mapping) or [*weights_dict] != ["policy"]:
            raise KeyError(
                f"HTSCollector has one model: weights_dict must be {{'policy': weights}}, got "
                f"{weights_dict!r}"
            )
        if given or model_id is not None:
            raise ValueError(f"give either weights_dict or {(*given, 'model_id')[0]}, not both")
        return weights_dict["policy"]
    if "policy_weights" in given:
        warnings.warn(
            "policy_weights is deprecated, as in TorchRL: give policy_or_weights",
            DeprecationWarning,
            stacklevel=3,
        )
    if len(given) > 1:
        raise ValueError(f"give either {' or '.join(given)}, not both")
    return next(iter(given.values()), None)
