"""Reads the files that a run leaves on disk."""

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from salesrl_trl.names import REWARD_EXPOSED, REWARD_HIDDEN, REWARD_SECONDS, STEP_SECONDS, Phase, time_of
from support.seconds import check_seconds


def events(output_dir):
    """Every TensorBoard scalar of a run: name to its events, in the order they were written."""
    found = {}
    for path in sorted(output_dir.rglob("events.out.tfevents.*")):
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            found.setdefault(tag, []).extend(accumulator.Scalars(tag))
    return found


def scalars(output_dir):
    """The same by values alone."""
    return {tag: [event.value for event in each] for tag, each in events(output_dir).items()}


def check_times(output_dir, steps):
    """Assert that times fit together, and return the seconds by phase of each step. Phases sum to their step. Steps
    sum to the time between log lines on TensorBoard's own clock. The rewards' time is the hidden plus the exposed."""
    logged = events(output_dir)
    by_phase = {phase: {event.step: event.value for event in logged[f"train/{time_of(phase)}"]} for phase in Phase}
    lines = {event.step: event for event in logged[f"train/{STEP_SECONDS}"]}
    assert sorted(lines) == list(range(1, steps + 1))
    for step, line in lines.items():
        total = sum(values[step] for values in by_phase.values())
        assert abs(total - line.value) <= 1e-5 * line.value
        check_seconds(by_phase["unaccounted"][step], most=0.05 * line.value, what=f"unaccounted for in step {step}")
    # From a step's end to its line a busy machine takes now a millisecond and now a hundred, which does not add up
    passed = lines[steps].wall_time - lines[1].wall_time
    measured = sum(lines[step].value for step in range(2, steps + 1))
    check_seconds(abs(measured - passed), most=0.02 * passed + 0.2, what=f"between {measured} and {passed}")
    for makespan, exposed, hidden in zip(
        *(logged[f"train/{name}"] for name in (REWARD_SECONDS, REWARD_EXPOSED, REWARD_HIDDEN)), strict=True
    ):
        assert abs(exposed.value + hidden.value - makespan.value) <= 1e-5 * makespan.value
        assert exposed.value >= 0 and hidden.value >= -1e-6
    return [{phase: values[step] for phase, values in by_phase.items()} for step in sorted(lines)]


def spans(output_dir):
    """The events of a run's trace that have a duration, by their track's name. Of a killed run it lacks its end."""
    text = (output_dir / "trace.json").read_text(encoding="utf-8").rstrip()
    trace = json.loads(text if text.endswith("]") else f"{text}]")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    found = {}
    for event in trace:
        if event["ph"] == "X":
            found.setdefault((event["pid"], names[event["pid"], event["tid"]]), []).append(event)
    return found
