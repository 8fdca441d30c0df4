"""How long a step of Google Research Football takes, and how it is distributed.

    python benchmarks/football_steps.py --output-dir runs/football_steps
    python benchmarks/football_steps.py --scenarios academy_corner --engine envpool --steps 2000

One environment after the other plays random actions on one core. Reported for each scenario: mean,
standard deviation, 99th percentile and autocorrelation of the times of steps, resets apart from
them, and what the resets add to a step on average.

The HTS-RL paper models the time of alpha steps as a Gamma variable and shows that sums of 100 step
times fit one (Kolmogorov-Smirnov, D = 0.04). Here the sums are of 100 steps in a row that share
none, with the resets among them (what an executor waits for) and without. A Gamma distribution is
fitted to them. Its parameters come from the same data, so the p-value is that of a parametric
bootstrap: samples of the fitted distribution, fitted and tested in the same way. The step times
that the model assumes, independent and exponential, have the shape 100 there, and no
autocorrelation. Needs scipy.

Writes football_steps.json after each scenario, with every time in it, so that a run that was
stopped goes on where it was, and football_steps.svg. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import _recipes  # noqa: F401  so that the package of this checkout is found
import numpy as np
from _machine import machine
from _measurements import write_json
from matplotlib.figure import Figure
from scipy import stats

from torchrl_hts.bench.command_line import count, make_directory
from torchrl_hts.envs import make_football

Array = np.ndarray[Any, Any]

SCENARIOS = [
    "academy_empty_goal_close",
    "academy_empty_goal",
    "academy_run_to_score",
    "academy_run_to_score_with_keeper",
    "academy_pass_and_shoot_with_keeper",
    "academy_run_pass_and_shoot_with_keeper",
    "academy_3_vs_1_with_keeper",
    "academy_corner",
    "academy_counterattack_easy",
    "academy_counterattack_hard",
    "academy_single_goal_versus_lazy",
    "11_vs_11_easy_stochastic",
    "5_vs_5",
]
SUM_OF = 100  # steps, as in the paper
LAGS = (1, 2, 5, 10, 50)
WARM_UP = 100  # steps that aren't measured


def step_times(scenario: str, engine: str, steps: int) -> tuple[Array, Array]:
    """Seconds of each step, and of the reset after it (0 where there was none)."""
    env = make_football(scenario, engine=engine)
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(19, size=steps + WARM_UP)
    stepping, resetting = np.zeros(len(actions)), np.zeros(len(actions))
    for index, action in enumerate(actions.tolist()):
        began = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        stepped = time.perf_counter()
        stepping[index] = stepped - began
        if terminated or truncated:
            env.reset()
            resetting[index] = time.perf_counter() - stepped
    env.close()
    return stepping[WARM_UP:], resetting[WARM_UP:]


def autocorrelation(times: Array, lag: int) -> float:
    """Of a series with itself, so many steps later."""
    return float(np.corrcoef(times[:-lag], times[lag:])[0, 1])


def fitted_distance(sums: Array) -> tuple[float, float, float]:
    """Shape and scale of the Gamma distribution of largest likelihood, and its distance D."""
    shape, _, scale = stats.gamma.fit(sums, floc=0)
    distance = stats.kstest(sums, "gamma", args=(shape, 0, scale)).statistic
    return float(shape), float(scale), float(distance)


def gamma_check(times: Array, bootstrap: int) -> dict[str, Any]:
    """Whether sums of 100 successive times are Gamma distributed.

    Returns:
        the number of sums, shape and scale (in seconds) of the fit, the Kolmogorov-Smirnov distance
        D, and its bootstrapped p-value.
    """
    sums = times[: len(times) // SUM_OF * SUM_OF].reshape(-1, SUM_OF).sum(1)
    shape, scale, distance = fitted_distance(sums)
    generator = np.random.default_rng(0)
    larger = sum(
        fitted_distance(generator.gamma(shape, scale, len(sums)))[2] >= distance
        for _ in range(bootstrap)
    )
    return {
        "sums": len(sums),
        "shape": shape,
        "scale_s": scale,
        "distance": distance,
        "p_value": (larger + 1) / (bootstrap + 1),
        "sums_s": sums.tolist(),
    }


def measure(scenario: str, options: argparse.Namespace) -> dict[str, Any]:
    """All that is reported of a scenario."""
    stepping, resetting = step_times(scenario, options.engine, options.steps)
    resets = resetting[resetting > 0]
    return {
        "steps": len(stepping),
        "mean_s": float(stepping.mean()),
        "std_s": float(stepping.std(ddof=1)),
        "percentile_99_s": float(np.percentile(stepping, 99)),
        "autocorrelation": {lag: autocorrelation(stepping, lag) for lag in LAGS},
        "resets": len(resets),
        "reset_mean_s": float(resets.mean()) if len(resets) else None,
        "reset_std_s": float(resets.std(ddof=1)) if len(resets) > 1 else None,
        "reset_per_step_s": float(resetting.mean()),
        "with_resets_std_s": float((stepping + resetting).std(ddof=1)),
        "gamma_of_steps": gamma_check(stepping, options.bootstrap),
        "gamma_with_resets": gamma_check(stepping + resetting, options.bootstrap),
        "step_us": np.rint(1e6 * stepping).astype(int).tolist(),
        "reset_us": np.rint(1e6 * resetting).astype(int).tolist(),  # 0: no reset
    }


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """A row per scenario, in Markdown; times in milliseconds."""
    columns = ["scenario", "step (std; 99 %)", "autocorrelation at 1 / 10", "resets", "reset (std)"]
    columns += ["resets per step", "Gamma D of steps (p)", "with resets (p)"]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for scenario, result in results.items():
        ms = {key: 1e3 * value for key, value in result.items() if key.endswith("_s") and value}
        lags = result["autocorrelation"]
        reset = f"{ms.get('reset_mean_s', 0):.1f} ({ms.get('reset_std_s', 0):.1f})"
        checks = [
            f"{result[name]['distance']:.3f} ({result[name]['p_value']:.3f})"
            for name in ("gamma_of_steps", "gamma_with_resets")
        ]
        cells = [
            scenario,
            f"{ms['mean_s']:.2f} ({ms['std_s']:.2f}; {ms['percentile_99_s']:.2f})",
            f"{lags['1']:.2f} / {lags['10']:.2f}",
            str(result["resets"]),
            reset if result["resets"] else "",
            f"{ms.get('reset_per_step_s', 0):.2f}",
            *checks,
        ]
        print("| " + " | ".join(cells) + " |")


def draw(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Step times, and the sums of 100 against the fitted Gamma, a row for each scenario."""
    figure = Figure(figsize=(9, 1.5 * len(results) + 1.0), layout="constrained")
    figure.suptitle(title)
    rows = figure.subplots(len(results), 2, squeeze=False)
    shares = np.linspace(0.005, 0.995, 34)  # the extremes would squeeze the rest
    longest_us = max(max(result["step_us"] + result["reset_us"]) for result in results.values())
    least_us = min(np.quantile(result["step_us"], shares[0]) for result in results.values())
    decades = 10 ** np.floor(np.log10(least_us / 1e3)), 10 ** np.ceil(np.log10(longest_us / 1e3))
    for (left, right), (scenario, result) in zip(rows, results.items(), strict=True):
        resets = np.array(result["reset_us"])
        for label, times_us in (("steps", result["step_us"]), ("resets", resets[resets > 0])):
            if len(times_us):
                left.plot(np.quantile(times_us, shares) / 1e3, shares, label=label)
        left.axvline(1e3 * result["mean_s"], color="grey", linewidth=1)
        left.set(xscale="log", xlim=decades, ylabel="share")
        left.set_title(scenario, loc="left", fontsize="medium")
        for name, label in (("gamma_of_steps", "steps"), ("gamma_with_resets", "with resets")):
            check = result[name]
            sums_s = np.quantile(check["sums_s"], shares)
            label = f"{label}, D = {check['distance']:.3f}"
            (line,) = right.plot(sums_s, shares, label=label)
            fitted = stats.gamma.cdf(sums_s, check["shape"], 0, check["scale_s"])
            right.plot(sums_s, fitted, "--", color=line.get_color(), linewidth=1)
        for axes in (left, right):
            axes.legend(fontsize="small")
            axes.grid(alpha=0.3)
    rows[-1, 0].set_xlabel("ms; the line is the mean step")
    rows[-1, 1].set_xlabel(f"seconds of {SUM_OF} steps; dashed: fitted Gamma")
    figure.savefig(path)


def main() -> None:
    """Parses the flags, measures what is missing, and shows all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser.add_argument("--scenarios", type=names, default=SCENARIOS, help="by default all")
    parser.add_argument("--engine", choices=["gfootball", "envpool"], default="gfootball")
    parser.add_argument("--steps", type=count, default=20_000, help="of each scenario (20000)")
    parser.add_argument("--bootstrap", type=count, default=500, help="samples for p-values (500)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs", "football_steps"))
    options = parser.parse_args()
    if options.steps < 2 * SUM_OF:
        parser.error(f"--steps must be at least {2 * SUM_OF}: the Gamma check sums {SUM_OF} each")

    make_directory(options.output_dir)
    file = options.output_dir / "football_steps.json"
    settings = {name: getattr(options, name) for name in ("engine", "steps", "bootstrap")}
    settings["format"] = 2
    report = {"settings": settings, "machine": machine(), "results": {}}
    if file.exists():
        report = json.loads(file.read_text())
        if report["settings"] != settings:
            parser.error(f"{file} holds measurements with {report['settings']}: delete it, or give "
                         "another --output-dir")  # fmt: skip
    for scenario in options.scenarios:
        if scenario not in report["results"]:
            report["results"][scenario] = measure(scenario, options)
            write_json(file, report)
    results = json.loads(file.read_text())["results"]  # keys as they are in the file
    print_table(results)
    draw(results, f"{options.engine}, random actions", file.with_suffix(".svg"))


if __name__ == "__main__":
    main()
