"""The table of faults that is printed after the tests: worker by worker, faults x phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

PHASES = (
    *("start-up", "calibration", "first reset", "first step", "first round", "begin of a round"),
    *("mid-round", "after an end", "end of a round", "learner learns", "checkpoint", "shutdown"),
)
LETTERS = {"raised": "R", "replaced": "S", "ended": "E"}


class Case(NamedTuple):
    """A fault that a test has tried."""

    worker: str
    fault: str
    phase: str
    outcome: str  # "raised", "replaced" or "ended"


def fault_table(stats: Mapping[str, Sequence[Any]]) -> list[str]:
    """The lines to print, of the reports of all tests; none if no fault was tried.

    Args:
        stats: reports by category. The last of a test holds what it has recorded: ``"fault"``,
            a `Case`; ``"rows"``, compared and lost; ``"left"``, processes, segments and
            descriptors; ``"seconds"``, what took how long after which fault.
    """
    reports = [report for each in stats.values() for report in each if hasattr(report, "when")]
    failed = {report.nodeid for report in reports if report.failed}
    cases: list[Case] = []
    compared = lost = left = 0
    slowest: dict[tuple[str, bool], tuple[float, str]] = {}
    tests = [report for report in reports if report.when == "teardown"]
    tests = [t for t in tests if any(name == "fault" for name, _ in t.user_properties)]
    for test in tests:
        for name, value in test.user_properties:
            if name == "fault" and test.nodeid not in failed:
                cases.append(Case(*value))
            elif name == "rows":
                compared, lost = compared + value[0], lost + value[1]
            elif name == "left":
                left += value
            elif name == "seconds":
                what, fault, seconds = value
                case = (what, fault in ("hang", "stop"))
                slowest[case] = max(slowest.get(case, (0.0, "")), (seconds, fault))
    if not tests:
        return []
    lines = [
        "R: one error, and a clean end; S: survived with a replacement; E: ended in a shutdown",
        "",
    ]
    for worker in sorted({case.worker for case in cases}):
        lines += [*_matrix([case for case in cases if case.worker == worker]), ""]
    outcomes = Counter(case.outcome for case in cases)
    broken = len(failed & {test.nodeid for test in tests})
    lines.append(
        f"{len(cases)} cases: {outcomes['replaced']} survived with replacement, "
        f"{outcomes['raised'] + outcomes['ended']} ended cleanly; {broken} tests failed"
    )
    lines.append(
        f"{compared:,} rows held against undisturbed runs, {lost} lost or changed; "
        f"{left} processes, segments and descriptors left"
    )
    for (what, timed_out), (seconds, fault) in sorted(slowest.items()):
        which = ", a time-out among it" if timed_out else ""
        lines.append(f"{what} after {seconds:.1f} s at most ({fault}){which}")
    return lines


def _matrix(cases: Sequence[Case]) -> Iterator[str]:
    """A column per phase, a row per fault, a letter per case."""
    phases = [phase for phase in PHASES if any(case.phase == phase for case in cases)]
    phases += sorted({case.phase for case in cases} - {*phases})
    faults = sorted({case.fault for case in cases})
    first = max(map(len, [cases[0].worker, *faults]))
    yield "  ".join([cases[0].worker.ljust(first), *phases])
    for fault in faults:
        cells = [
            "".join(
                sorted(LETTERS[c.outcome] for c in cases if (c.fault, c.phase) == (fault, phase))
            )
            for phase in phases
        ]
        columns = [(cell or ".").ljust(len(p)) for cell, p in zip(cells, phases, strict=True)]
        yield "  ".join([fault.ljust(first), *columns]).rstrip()
