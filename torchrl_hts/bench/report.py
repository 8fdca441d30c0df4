"""What ``python -m torchrl_hts.bench`` prints: a recommendation, warnings, and then the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrl_hts._planning.probe import EnvironmentTimes
from torchrl_hts._reports.wording import plural, time_text
from torchrl_hts.bench.forecast import Costs, Forecast, Setting

__all__ = [
    "Row",
    "Tried",
    "batches_text",
    "costs_text",
    "described",
    "forecasts_text",
    "is_busy",
    "recommendation",
    "warnings_text",
]

_BAR = 40  # width of the longest bar of a histogram
_FAR_OFF = 1.5  # measured and expected differ by more than this factor
_OTHERS = 0.1  # the part of the cores that others may use before anything is said
_PAYS = 0.2  # the part of a step's time that batches have to spare for it to be worth their while

_LIMITS = {
    "schedule": "waiting for each other",
    "inference": "inference",
    "learner": "the learner",
    "cores": "the cores",
}


@dataclass(frozen=True)
class Tried:
    """Steps per second of a short run without a learner, and what was expected of it."""

    measured: float
    expected: float


@dataclass(frozen=True)
class Row:
    """Forecasts of a number of environments and actors and an alpha.

    Attributes:
        each: one for each lag.
        barrier: with lag 1 and the paper's barrier.
        claim: the paper's Claim 1, a share like `Forecast.schedule_share`.
    """

    each: Sequence[Forecast]
    barrier: Forecast
    claim: float


def described(setting: Setting, batch: int = 1) -> str:
    """A setting in words; of batches of so many environments."""
    num_envs = plural(setting.num_envs, "environment")
    if batch > 1:
        num_envs = f"{setting.num_envs} batch{'es' * (setting.num_envs > 1)} of {batch}"
    return (
        f"{num_envs}, alpha {setting.sync_interval}, "
        f"lag {setting.lag}, {plural(setting.num_actors, 'actor')}"
    )


def recommendation(best: Forecast, executors: int, tried: Tried | None, batch: int = 1) -> str:
    """The setting to take in one sentence, as code, and why."""
    setting = best.setting
    make = "make_env" if batch == 1 else "make_batch"
    rows = f"{setting.num_envs}" if batch == 1 else f"{setting.num_envs} * {batch}"
    text = (
        f"Take {described(setting, batch)}: {best.steps_per_second:,.0f} steps/s are expected, "
        f"limited by {_LIMITS[best.limit]}.\n\n"
        f"    HTSCollector([{make}] * {setting.num_envs}, policy,\n"
        f"                 frames_per_batch={rows} * {setting.sync_interval}, "
        f"lag={setting.lag}, num_actors={setting.num_actors},\n"
        f"                 num_executors={executors})\n\n"
        "Of the settings within 5 % of the fastest it has the fewest actors and environments, and "
        "the shortest\nrounds; take the alpha that your algorithm wants."
    )
    if tried is not None:
        text += (
            f"\nTried out without a learner: {tried.measured:,.0f} steps/s measured, "
            f"{tried.expected:,.0f} expected."
        )
    return text


def is_busy(others: float | None, cores: float) -> bool:
    """Whether other programs keep so many of the cores busy that all figures are doubtful.

    Args:
        others: cores that they keep busy, if that is known.
        cores: that there are.
    """
    return others is not None and others > _OTHERS * cores


def warnings_text(others: float | None, cores: float, tried: Tried | None) -> list[str]:
    """What makes the figures doubtful, a sentence each.

    Args:
        others: cores that other programs keep busy, if that is known.
        cores: that there are.
        tried: what came of the recommendation, where it was tried.
    """
    found = []
    if is_busy(others, cores):
        found.append(
            f"Warning: other programs use {others:.1f} of the {cores:g} cores, so all figures are "
            "of a busy machine:\nrepeat this when they rest."
        )
    if tried is not None:
        factor = tried.measured / tried.expected
        if not 1 / _FAR_OFF <= factor <= _FAR_OFF:
            times, than = (factor, "more") if factor > 1 else (1 / factor, "less")
            found.append(
                f"Warning: {times:.1f} times {than} was measured than expected, so the figures of "
                "the table don't hold here:\ntry the settings that you consider in your own loop."
            )
    return found


def batches_text(costs: Costs, *, busy: bool) -> list[str]:
    """Whether batches pay, or larger ones: environments share what an executor itself takes.

    Nothing is said where that could not be measured.

    Args:
        costs: what was measured.
        busy: whether other programs used the cores meanwhile.
    """
    rows = costs.passes.rows[-1]
    own_s = costs.executor_cpu_s / costs.batch
    if busy or not own_s:  # it is a difference of two measurements, cut off at 0
        return []
    step_s = costs.mean_step_s * costs.step_cpu_share + costs.learner_step_s
    step_s = own_s + (step_s + costs.pass_time(rows) / rows) / costs.batch
    text = (
        f"Batches of environments: of the {time_text(step_s)} that a core has to do for a step, "
        f"{time_text(own_s)} are the executor's\nown part, "
    )
    pays = own_s > _PAYS * step_s
    if costs.batch > 1:
        larger = f"larger batches would {'' if pays else 'hardly '}pay"
        return [f"{text}which {costs.batch} environments share: {larger}."]
    if pays:
        advice = "batches would pay. Let create_env_fn make a VectorEnv."
        return [f"{text}which a batch shares: {advice}"]
    return [f"{text}which a batch that steps as one would share: batches would hardly pay."]


def costs_text(times: EnvironmentTimes, costs: Costs) -> str:
    """What was measured, each part alone."""
    steps = times.steps
    marks = [*np.quantile(steps, (0.05, 0.5, 0.95, 0.99)), steps.max()]
    lines = [
        f"step      {time_text(steps.mean())} on average, standard deviation "
        f"{time_text(steps.std())}; {times.cpu_share:.0%} of a core{_of(costs.batch)}",
        f"          5 %, 50 %, 95 %, 99 %, most: {', '.join(map(time_text, marks))}",
    ]
    exponents, counts = np.unique(np.floor(np.log2(steps * 1e6)), return_counts=True)
    for exponent, number in zip(exponents.astype(int), counts.tolist(), strict=True):
        bar = "#" * -(-_BAR * number // counts.max())
        lines.append(f"          {time_text(2.0**exponent / 1e6):>8} and more {number:>8,} {bar}")
    if len(times.resets):
        lines.append(
            f"reset     {time_text(times.resets.mean())} on average, {len(times.resets):,} times "
            f"in {len(steps):,} steps"
        )
    else:
        lines.append(f"reset     none: no episode ended in {len(steps):,} steps")
    passes = zip(costs.passes.rows, costs.passes.times, strict=True)
    lines += [
        "policy    "
        + ", ".join(f"{costs.batch * rows:.0f} rows {time_text(taken)}" for rows, taken in passes),
        f"learner   {time_text(costs.learner_step_s)} for each step{_of(costs.batch)}",
        f"collector {time_text(costs.executor_cpu_s)} of an executor for each step, "
        f"{time_text(costs.actor_cpu_s)} of an actor for each pass, besides the above",
    ]
    return "\n".join(lines)


def _of(batch: int) -> str:
    return f" (of {batch} environments)" if batch > 1 else ""


def forecasts_text(rows: Sequence[Row], cores: int, batch: int = 1) -> str:
    """A table of what to expect: a line per row, a column per lag."""
    counted = "envs" if batch == 1 else f"x{batch}"
    heads = [f"lag {each.setting.lag}" for each in rows[0].each]
    lines = [
        f"Steps per second to expect on {cores} cores while the learner learns, limited by "
        "(s)chedule, (i)nference,\n(l)earner or (c)ores; and the theory: the share of the speed of "
        "executors that never wait that the\nschedule and the learner alone allow.\n",
        f"{counted:>5}{'actors':>7}{'alpha':>6}"
        + "".join(f"{head:>19}" for head in heads)
        + f"{'lag 1, barrier':>19}{'Claim 1':>9}",
    ]
    for row in rows:
        setting = row.barrier.setting
        cells = "".join(_cell(each) for each in [*row.each, row.barrier])
        lines.append(
            f"{setting.num_envs:>5}{setting.num_actors:>7}{setting.sync_interval:>6}{cells}"
            f"{row.claim:>9.2f}"
        )
    lines.append(
        "\nlag 1, barrier: as in the paper, all wait for the slowest at the end of each round. "
        "Claim 1: the paper's\nformula for that, if step times were exponential and the learner "
        "free."
    )
    return "\n".join(lines)


def _cell(each: Forecast) -> str:
    return f"{each.steps_per_second:>9,.0f} ({each.limit[0]}) {each.schedule_share:>5.2f}"
