"""A return that the last evaluation has to reach. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.errors import RecipeError
from support.options import RunOptions, option

if TYPE_CHECKING:
    from support.run import Run
    from torchrl_hts import World

__all__ = ["ReturnOptions", "check_return"]


@dataclass(frozen=True)
class ReturnOptions(RunOptions):
    """What is asked of the result."""

    require_return: float | None = option(
        None,
        "exit with an error unless the last evaluation's mean return reaches this",
        may_change=True,
    )

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        super().__post_init__()
        if self.require_return is not None and not self.eval_interval:
            raise RecipeError("--require-return looks at evaluations: leave --eval-interval 0 out")


def check_return(run: Run, world: World) -> None:
    """Refuse the result of a run that has come to its end, if it is too bad.

    Args:
        run: whose options say what its last evaluation must have reached.
        world: the learners, of which the first evaluates.

    Raises:
        RecipeError: says what it is, and what to try.
    """
    required = vars(run.options)["require_return"]
    if required is None or not world.is_first or run.exit_code:
        return
    if not run.last_evaluation >= required:
        raise RecipeError(
            f"the mean evaluation return {run.last_evaluation:.1f} is below the required "
            f"{required:.1f}; try more --total-frames or another --seed"
        )
