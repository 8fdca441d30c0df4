"""Options: one typed dataclass per recipe, one place of defaults, a flag for each field."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from support.configuration import read_config
from support.errors import RecipeError
from support.flags import HelpFormatter, as_switches, integer
from support.launch import is_first, is_own, launch_name
from support.old_runs import refuse_busy, refuse_old_run

__all__ = [
    "Options",
    "RunOptions",
    "check_minibatches",
    "differences",
    "from_json",
    "option",
    "parse_options",
    "to_json",
]

Options = TypeVar("Options", bound="RunOptions")

_MOST = 10**12  # of an integer that has no other bound


def option(
    default: Any,
    explanation: str,
    *,
    may_change: bool = False,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field of an options dataclass.

    Args:
        default: its default.
        explanation: the line that ``--help`` shows for it.
        may_change: whether a resumed run may be given another value: its results are the same.
        least, most: the smallest and the largest value that makes sense.
    """
    metadata = {"help": explanation, "may_change": may_change, "least": least, "most": most}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunOptions:
    """Options of every recipe."""

    whole_rows: ClassVar[bool] = False  # whether minibatches are of whole rows instead of steps

    seed: int = option(0, "seed of everything random", least=0)
    total_frames: int = option(1_000_000, "environment steps in all", least=1)
    torch_threads: int = option(
        1, "threads of the learner; more where cores are left over", least=1, most=1024
    )
    shards: int | None = option(
        None,
        "parts of a batch, a power of two; results then are the same for every number of learners "
        "that divides it (torchrun --nproc-per-node)",
        least=1,
        most=4096,
    )
    log_interval: int = option(4_000, "steps between two rows of metrics", least=1)
    logger: Literal["none", "csv", "tensorboard", "wandb"] = option(
        "none",
        "where metrics go, beside metrics.csv (extras 'wandb', 'tensorboard')",
        may_change=True,
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(
        None,
        "offline keeps the run on disk, for 'wandb sync'; by default WANDB_MODE, or online",
        may_change=True,
    )
    wandb_project: str | None = option(
        None,
        "project at Weights & Biases; by default WANDB_PROJECT, or torchrl_hts",
        may_change=True,
    )
    wandb_group: str | None = option(
        None, "group of the run there; by default WANDB_RUN_GROUP", may_change=True
    )
    wandb_name: str | None = option(
        None,
        "name of the run there; by default WANDB_NAME, or that of the output directory",
        may_change=True,
    )
    eval_interval: int = option(100_000, "steps between two evaluations; 0: none at all", least=0)
    eval_episodes: int = option(10, "episodes of each evaluation", least=1)
    eval_sampled: bool = option(False, "sample the actions of evaluations instead of the likeliest")
    eval_max_steps: int = option(
        0, "cut the episodes of evaluations off after so many steps; 0: never", least=0
    )
    record_video: bool = option(
        False, "keep the best evaluation episode as best.mp4 (extra 'video')"
    )
    checkpoint_interval: int = option(
        100_000,
        "steps between two checkpoints; 0: only where the run ends",
        may_change=True,
        least=0,
    )
    keep_checkpoints: int = option(3, "how many of the newest are kept", may_change=True, least=1)
    output_dir: Path | None = option(
        None, "by default runs/RECIPE/NAME-DATE-TIME-PID", may_change=True
    )
    resume: Path | None = option(
        None, "go on with the run in this output directory; its options hold", may_change=True
    )
    ignore_versions: bool = option(
        False, "resume with other versions of the packages, not bit for bit", may_change=True
    )

    @property
    def task(self) -> str:
        """What is learned: by default ``env_id``, which the options of a recipe then have."""
        return self.env_id

    def check_task(self) -> None:
        """Find out whether there is such a task; called before torch is imported, which is slow.

        Raises:
            ValueError, ModuleNotFoundError, gymnasium.error.Error: if there is none.
        """
        import gymnasium as gym

        gym.make(self.task).close()

    def check_start(self) -> None:
        """Find out what stands against a start, too; raises what `check_task` does."""
        self.check_task()

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            least, most = entry.metadata["least"], entry.metadata["most"]
            if isinstance(value, float) and not math.isfinite(value):
                raise RecipeError(f"{_flag(entry.name)} must be a finite number, and is {value}")
            if isinstance(value, int) and most is None:
                most = _MOST
            if least is not None and value is not None and not value >= least:
                raise RecipeError(f"{_flag(entry.name)} must be at least {least}, and is {value}")
            if most is not None and value is not None and not value <= most:
                raise RecipeError(f"{_flag(entry.name)} must be at most {most}, and is {value}")
        if self.shards is not None and self.shards & (self.shards - 1):
            raise RecipeError(f"--shards must be a power of two, and is {self.shards}")
        self.check_parts(self.shards)
        if self.record_video and not self.eval_interval:
            raise RecipeError("--record-video films evaluations: leave --eval-interval 0 out")

    def check_learners(self, number: int) -> None:
        """Refuse what so many learners can't have equally."""
        if self.shards is None:
            self.check_parts(number if number > 1 else None)
        elif self.shards % number:
            raise RecipeError(
                f"--shards {self.shards} can't be shared out equally among {number} learners: "
                "start 1, or another divisor of it"
            )

    def check_parts(self, parts: int | None) -> None:
        """Refuse what parts of a batch can't have equally.

        Args:
            parts: shards, or learners without shards; None: one learner alone.
        """
        envs = vars(self).get("num_envs")
        if envs is not None and envs % (parts or 1):
            of = "learners" if self.shards is None else "shards"
            raise RecipeError(
                f"--num-envs {envs} environments can't be shared out equally among {parts} {of}: "
                f"give a multiple of {parts}"
            )
        size = vars(self).get("minibatch_size")
        if size is not None and envs is not None:
            rows = vars(self)["sync_interval"]
            check_minibatches(envs * rows, size, parts, rows if self.whole_rows else 1)


def check_minibatches(total: int, size: int, parts: int | None, length: int = 1) -> None:
    """Refuse minibatches that a batch can't be cut into.

    Args:
        total: steps of the batch, of all learners.
        size: steps of a minibatch.
        parts: of all learners together; None: one learner alone, whose last one may be smaller.
        length: steps that stay together.

    Raises:
        RecipeError: names the options.
    """
    if size % length:
        raise RecipeError(
            f"--minibatch-size {size} is no number of whole rows, which have {length} steps: give "
            f"a multiple of {length}"
        )
    count, items = max(1, total // size), total // length
    if parts is not None and (count * size != total or items % (parts * count)):
        fitting = [total // n for n in range(1, items // parts + 1) if items % (parts * n) == 0]
        nearest = min(fitting, key=lambda fit: abs(fit - size), default=total)
        raise RecipeError(
            f"--minibatch-size {size} does not fit a batch of {total} steps in {parts} parts: with "
            "several parts every minibatch must have the same number of steps of each, as with "
            f"--minibatch-size {nearest}"
        )


def parse_options(
    options_class: type[Options], description: str | None, arguments: Sequence[str] | None = None
) -> Options:
    """Makes options from command-line flags, one for each field of a dataclass.

    ``num_envs: int = option(16, "...")`` becomes ``--num-envs``; a bool also gets ``--no-...``.
    Fields of type ``T | None`` keep None unless they are given. With ``--resume`` the defaults are
    the values of the run to go on with.

    Args:
        options_class: a dataclass whose fields are made with `option`.
        description: the text above the flags in ``--help``.
        arguments: by default those of the command line.

    Raises:
        RecipeError: if there is no run to go on with, or an option can't change.
    """
    words = as_switches(sys.argv[1:] if arguments is None else arguments, _switches(options_class))
    given = _parser(options_class, description).parse_args(words)
    chosen = vars(given)
    if chosen.get("resume") is None:
        options = options_class(**chosen)
        # Of torchrun's learners the first alone: others may not know their own run, and end with
        # it. Under srun they would wait for it.
        refuses = is_first() or launch_name() is None
        if options.output_dir is not None and refuses and not is_own(options.output_dir):
            refuse_busy(options.output_dir)
            refuse_old_run(options.output_dir)
        return options
    if "output_dir" in chosen:
        raise RecipeError("a resumed run stays in its directory: leave --output-dir out")
    file = chosen["resume"] / "config.json"
    config = None
    try:
        config = read_config(file)
        saved = from_json(options_class, config["options"])
    except (FileNotFoundError, NotADirectoryError):
        raise RecipeError(
            f"{chosen['resume']} holds no run to go on with: there is no {file.name}; give the "
            "output directory of a run"
        ) from None
    except OSError as error:
        raise RecipeError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecipeError) as error:
        advice = (
            "put the file back as it was, or begin anew with another --output-dir"
            if config is None
            else f"it is of {config['recipe']!r}: resume with that, of the version that made it, "
            "or put the file back if it was changed"
        )
        raise RecipeError(
            f"{file} is not the configuration of a run of this recipe ({error}); {advice}"
        ) from error
    anew = {"output_dir": None, "ignore_versions": False}
    options = options_class(**{**vars(saved), **anew, **chosen})
    changed = differences(asdict(saved), options)
    if changed:
        raise RecipeError(
            f"a resumed run keeps its options, and {'; '.join(changed)}: leave them out, or start "
            "a new run"
        )
    return options


def differences(saved: dict[str, Any], options: RunOptions) -> list[str]:
    """The options that differ although they may not, each with both values."""
    own = asdict(options)
    return [
        f"{_flag(entry.name)} was {saved.get(entry.name)} and is {own[entry.name]}"
        for entry in fields(options)
        if not entry.metadata["may_change"] and own[entry.name] != saved.get(entry.name)
    ]


def to_json(options: RunOptions) -> dict[str, Any]:
    """The options as plain values."""
    values = asdict(options)
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def from_json(options_class: type[Options], values: dict[str, Any]) -> Options:
    """The inverse of `to_json`.

    Raises:
        TypeError: for a name that is no option's, or a value that is not of its option's type.
    """
    hints = typing.get_type_hints(options_class)
    for name, value in values.items():
        if name not in hints:
            raise TypeError(f"it has an option {_flag(name)}, which is unknown here")
        if not _fits(value, hints[name]):
            raise TypeError(f"{_flag(name)} can't be {value!r}")
    restored = {
        name: Path(value) if value is not None and _without_none(hints[name]) is Path else value
        for name, value in values.items()
    }
    return options_class(**restored)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value can be one of an option of this type."""
    kind = _without_none(hint)
    if value is None:
        return kind is not hint
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, {Path: str, float: (int, float)}.get(kind, kind))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _switches(options_class: type[Any]) -> set[str]:
    """The flags of what is on or off."""
    hints = typing.get_type_hints(options_class)
    return {
        _flag(entry.name)
        for entry in fields(options_class)
        if _without_none(hints[entry.name]) is bool
    }


def _given_anew(entry: Field[Any]) -> bool:
    """Whether a resumed run may be given another value."""
    return entry.metadata["may_change"] and entry.name not in ("output_dir", "resume")


def _parser(options_class: type[Any], description: str | None) -> argparse.ArgumentParser:
    anew = [_flag(entry.name) for entry in fields(options_class) if _given_anew(entry)]
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,  # by its whole name a sweep knows what it draws itself
        formatter_class=HelpFormatter,
        epilog=textwrap.fill(
            f"With --resume the options of the run hold. Given anew may be {', '.join(anew)}.",
            width=100,
            break_on_hyphens=False,
        ),
    )
    hints = typing.get_type_hints(options_class)
    groups = {
        owner: parser.add_argument_group((owner.__doc__ or "").split("\n")[0].rstrip("."))
        for owner in options_class.__mro__[:-1]
    }
    for entry in fields(options_class):
        if entry.default is MISSING:
            raise TypeError(f"{options_class.__name__}.{entry.name} has no default: use option()")
        owner = next(c for c in reversed(options_class.__mro__) if entry.name in vars(c))
        shown = "" if entry.default is None else f" (default: {entry.default})"
        settings: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": (entry.metadata["help"] + shown).replace("%", "%%"),
        }
        kind = _without_none(hints[entry.name])
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            settings["choices"] = typing.get_args(kind)
        else:
            settings |= {"type": integer if kind is int else kind, "metavar": kind.__name__.upper()}
        groups[owner].add_argument(_flag(entry.name), **settings)
    return parser


def _without_none(hint: Any) -> Any:
    """``T`` for ``T | None``, anything else as it is."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint
