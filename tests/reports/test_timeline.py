"""The timeline tells a story that the schedule allows, and changes nothing by telling it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import EchoEnv
from policies import categorical

from torchrl_hts import HTSCollector
from torchrl_hts._reports.picture import Box, boxes, waits_for_rounds
from torchrl_hts._reports.timeline import Timeline
from torchrl_hts._rounds.event_rings import RECORD, Activity
from torchrl_hts.testing import digest

pytestmark = pytest.mark.usefixtures("nothing_left")

N, ALPHA, ROUNDS = 4, 3, 6


def collector(**kwargs: Any) -> HTSCollector:
    defaults = {
        "frames_per_batch": N * ALPHA,
        "total_frames": N * ALPHA * ROUNDS,
        "num_executors": 2,
        "num_actors": 2,
        "seed": 0,
        "timeline_events": 1000,
    }
    return HTSCollector([partial(EchoEnv, lengths=(5,))] * N, categorical(), **defaults | kwargs)


def the_events(tmp_path: Path, **kwargs: Any) -> Timeline:
    with collector(**kwargs) as data:
        for _ in data:
            pass
        return data.timeline(tmp_path / "all.json")


def test_recording_changes_no_bit() -> None:
    """I7."""
    batches = []
    for timeline_events in (0, 3):
        with collector(timeline_events=timeline_events) as data:
            batches.append([digest(batch) for batch in data])
    assert batches[0] == batches[1]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_events_tell_what_the_schedule_allows(tmp_path: Path, lag: int) -> None:
    timeline = the_events(tmp_path, lag=lag)
    names = ["learner", "actor 0", "actor 1", "executor 0", "executor 1"]
    assert list(timeline.events) == names
    assert repr(timeline).startswith(f"Timeline(learner: {len(timeline.events['learner'])} events,")
    for name, events in timeline.events.items():
        assert (events["began"] <= events["ended"]).all()
        assert (events["began"][1:] >= events["ended"][:-1]).all(), f"{name} did two things at once"

    steps, passes = timeline.of(Activity.STEP), timeline.of(Activity.INFER)
    learned, resets = timeline.of(Activity.LEARN), timeline.of(Activity.RESET)
    step_rounds, pass_rounds = timeline.rounds(steps), timeline.rounds(passes)
    for env in range(N):  # I1: alpha steps in each round, in order, of the executor that owns it
        own = steps[steps["env"] == env]
        assert own["number"].tolist() == list(range(ALPHA * ROUNDS))
        assert (own["began"][1:] >= own["ended"][:-1]).all()
        (reset,) = resets[resets["env"] == env]
        assert reset["ended"] <= own["began"][0]
    assert set(timeline.events["executor 1"]["env"].tolist()) == {0, 2, 3}  # 0: waits have none

    assert learned["number"].tolist() == list(range(ROUNDS - 1))  # nobody asked for a round after
    for update in learned:
        of_it = steps[step_rounds == update["number"]]
        assert of_it["ended"].max() <= update["began"], "learned from a batch that was not full"
        opened = steps[step_rounds == update["number"] + lag + 1]
        assert (opened["began"] >= update["ended"]).all(), "I4: stepped in a round not yet open"

    for round_ in range(ROUNDS):  # I2: one pass serves one round; each step has had its action
        of_it = passes[pass_rounds == round_]
        assert of_it["rows"].sum() == N * ALPHA
        assert (of_it["padded"] >= of_it["rows"]).all()
        for step in steps[step_rounds == round_]:
            answered = of_it["rows"][of_it["ended"] <= step["began"]].sum()
            acted = (steps[step_rounds == round_]["began"] <= step["began"]).sum()
            assert answered >= acted, "stepped before the action was there"


def test_a_ring_keeps_the_newest(tmp_path: Path) -> None:
    timeline = the_events(tmp_path, timeline_events=5)
    assert [len(timeline.events[f"executor {index}"]) for index in (0, 1)] == [5, 5]
    assert max(map(len, timeline.events.values())) == 5
    assert timeline.of(Activity.STEP)["number"].max() == ALPHA * ROUNDS - 1


def test_the_trace_is_one_that_perfetto_reads(tmp_path: Path) -> None:
    with collector() as data:
        batches = iter(data)
        for _ in range(3):
            next(batches)
        data.timeline(tmp_path / "early.json.gz")  # while it runs
        for _ in batches:
            pass
        found = data.timeline(tmp_path / "all.json")
        data.timeline(str(tmp_path / "last.json"), num_rounds=2)
    trace = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    assert len(slices) == sum(map(len, found.events.values()))
    assert min(event["ts"] for event in slices) == 0
    threads = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert list(threads.values()) == list(found.events)
    assert {threads[e["tid"]].split()[0] for e in slices if e["cat"] == "step"} == {"executor"}
    updates = [event for event in slices if event["cat"] == "learn"]
    assert [event["args"] for event in updates] == [
        {"round": j, "policy version": j, "makes policy version": j + 2} for j in range(ROUNDS - 1)
    ]
    steps = Counter(e["args"]["round"] for e in slices if e["name"].startswith("step, round"))
    assert steps == dict.fromkeys(range(ROUNDS), N * ALPHA)

    early = json.loads(gzip.decompress((tmp_path / "early.json.gz").read_bytes()))["traceEvents"]
    assert 2 <= sum(event["ph"] == "X" and event["cat"] == "learn" for event in early) < ROUNDS
    last = json.loads((tmp_path / "last.json").read_text())["traceEvents"]
    kept = Counter(e["args"]["round"] for e in last if e["name"].startswith("step, round"))
    assert [kept[round_] for round_ in (ROUNDS - 2, ROUNDS - 1)] == [N * ALPHA] * 2
    assert len(last) < len(trace)


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with collector() as data:
        data.timeline(tmp_path / "empty.png")  # nothing has happened yet
        for _ in data:
            pass
        data.timeline(tmp_path / "a.png")
        data.timeline(tmp_path / "a.svg", num_rounds=1)
        for num_rounds in (0, -1):
            with pytest.raises(ValueError, match="num_rounds must be at least 1"):
                data.timeline(tmp_path / "none.svg", num_rounds=num_rounds)
        with pytest.raises(TypeError, match="num_rounds must be an int"):
            data.timeline(tmp_path / "none.svg", num_rounds=2.5)  # type: ignore[arg-type]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_what_a_picture_hatches() -> None:
    """Environment 0 is done with round 1 at 40; round 2 opens at 50. Environment 1 never waits.

    Round 3 opens at 90, but nobody begins it: it may be after the last.
    """

    def events(*records: tuple[int, int, int, Activity, int]) -> Any:
        return np.array([(*record, 0, 0) for record in records], RECORD)

    step, learn = Activity.STEP, Activity.LEARN
    timeline = Timeline(
        {
            "learner": events((25, 50, 0, learn, 0), (70, 90, 1, learn, 0)),
            "executor 0": events((0, 10, 0, step, 0), (20, 40, 1, step, 0), (60, 70, 2, step, 0)),
            "executor 1": events((0, 25, 0, step, 1), (25, 55, 1, step, 1), (60, 70, 2, step, 1)),
        },
        sync_interval=1,
        lag=1,
    )
    assert waits_for_rounds(timeline) == {0: [(40, 50)]}


def test_events_of_one_round_become_a_run_where_they_are_close() -> None:
    records = [(0, 10, 0), (15, 20, 0), (26, 30, 0), (31, 40, 1), (41, 45, 1)]
    events = np.array([(b, e, 0, Activity.INFER, 0, 3, 4) for b, e, _ in records], RECORD)
    rounds = np.array([round_ for _, _, round_ in records])
    alone = [Box(began, ended, round_, rows=3) for began, ended, round_ in records]
    assert boxes(events, rounds, None) == alone
    assert boxes(events, rounds, 5) == [
        Box(0, 20, 0, rows=6, events=2),
        Box(26, 30, 0, rows=3),
        Box(31, 45, 1, rows=6, events=2),
    ]


@pytest.mark.parametrize(("step_ns", "merged"), [(1_000_000, False), (5_000, True)])
def test_steps_too_short_to_be_seen_are_drawn_as_runs_and_a_note_says_so(
    tmp_path: Path, step_ns: int, merged: bool
) -> None:
    """Two environments step every millisecond, in rounds of 8."""
    pytest.importorskip("matplotlib")
    steps = [
        (1_000_000 * step, 1_000_000 * step + step_ns, step, Activity.STEP, env, 0, 0)
        for step in range(32)
        for env in (0, 1)
    ]
    waits = [(0, 1, round_, Activity.BATCH_WAIT, 0, 0, 0) for round_ in range(4)]
    events = {"learner": np.array(waits, RECORD), "executor 0": np.array(steps, RECORD)}
    timeline = Timeline(events, sync_interval=8, lag=1)
    timeline.write(tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_text()
    assert ("<!-- steps are too short to be seen: those of one round" in picture) is merged
    assert "<!-- waits for its round -->" not in picture, "nobody waits"


def test_the_last_rounds_after_a_state_was_loaded(tmp_path: Path) -> None:
    """They are those that were gathered since, whatever the numbers of those before."""
    with collector() as data:
        batches = iter(data)
        next(batches)
        state = data.state_dict()
        for _ in range(ROUNDS - 2):
            next(batches)
        frames = data.statistics().frames
        before = data.timeline(tmp_path / "before.json")
        data.load_state_dict(state)
        for _ in range(2):
            next(batches)
        statistics = data.statistics()
        timeline = data.timeline(tmp_path / "all.json").last(2)
    collected = frames + 2 * N * ALPHA
    assert statistics.frames_per_second * statistics.elapsed_s == pytest.approx(collected)
    loaded = before.of(Activity.BATCH_WAIT)["ended"].max()
    steps = timeline.of(Activity.STEP)
    assert (steps["began"] > loaded).all()
    rounds = set(timeline.rounds(steps).tolist())  # round 1 is of the state
    assert {2} <= rounds <= {2, 3, 4}


def test_arguments() -> None:
    timeline = Timeline({"learner": np.zeros(0, RECORD)}, sync_interval=8, lag=1)
    for rounds in (0, -1, 1.5, "x"):
        with pytest.raises((TypeError, ValueError), match=r"^num_rounds must be a"):
            timeline.last(rounds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^activity must be one of Activity.STEP, .*got 'step'"):
        timeline.of("step")  # type: ignore[arg-type]


def test_nothing_to_show(tmp_path: Path) -> None:
    with collector(timeline_events=0) as data:
        with pytest.raises(RuntimeError, match="timeline_events=100_000"):
            data.timeline(tmp_path / "trace.json")
        with pytest.raises(ValueError, match=r"\.json.*got 'trace.txt'"):
            data.timeline(tmp_path / "trace.txt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="timeline_events must be at least 0"):
        collector(timeline_events=-1)
