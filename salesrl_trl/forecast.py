"""`python -m salesrl_trl.forecast OUTPUT_DIR [--lookahead N ...] [--slots N] [--deadline S] [--server]`.

Says from a run's `trace.json` what a step would take with other settings. It plays the run's own steps again, drawn at
random: their generation, their training, and their rewards, each with the seconds that it took. A forecast is of a run
that keeps the order of rows, without `max_staleness`; the run itself has no vLLM server. Imports no torch. Exit code:
0; 2, with one message, for a folder without such a trace.
"""

import argparse
import heapq
import json
import random
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.command_line import exit_code
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.names import SERVER_TRACK, SETTINGS_FILE, TRACE_FILE, Phase

PLAYED = 400  # steps. The mean of a run whose rewards vary by a third is then exact within some 2 %
_NOT_OF_A_STEP = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.LOGGING)
_REWARD = re.compile(r"reward (\d+)(?: ahead (\d+))?")


class RewardTime(NamedTuple):
    """One completion's reward."""

    after: float  # seconds from the end of its batch's generation to its start; negative during the generation
    seconds: float
    part: int  # number of the part of its batch with which it trains


class TracedStep(NamedTuple):
    """Seconds of a step, and the rewards of a batch."""

    generation: float
    push: float  # of weights into vLLM
    training: float  # all but generation, push and waiting
    rewards: Sequence[RewardTime]


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """What a trace says of a run."""

    steps: Sequence[TracedStep]
    parts: int  # of a batch, each of which trains as soon as its rewards are in
    step_s: float  # mean over `steps` as they were measured
    waited_s: float


def forecast(
    run: TracedRun, lookahead: int, *, slots: int = 0, deadline_s: float = 0.0, server: bool = False
) -> tuple[float, float]:
    """Mean seconds of a step, and those of them that wait for rewards, or for a server's generation. `slots`: rewards
    at once, 0 for as many as there are. `deadline_s`: seconds after which a reward ends, 0 for never. `server`:
    generation goes on beside training, on another card, as fast as in the run; a push waits until it has answered."""
    draw = random.Random(0)  # of the order of steps
    now = engine = waited = 0.0  # seconds; `engine`: when the server is free
    free: list[float] = []  # when each slot is free again
    ready: list[list[float]] = []  # of each batch, by part
    ends, waits = [0.0], list[float]()

    def launch(step: TracedStep, at: float) -> None:
        parts = [at] * run.parts
        for after, seconds, part in sorted(step.rewards):
            begins = at + after
            if slots and len(free) == slots:
                begins = max(begins, heapq.heappop(free))
            end = begins + (min(seconds, deadline_s) if deadline_s else seconds)
            if slots:
                heapq.heappush(free, end)
            parts[part] = max(parts[part], end)
        ready.append(sorted(parts))

    for number in range(PLAYED):
        waited = 0.0
        while len(ready) <= number + lookahead:
            step = draw.choice(run.steps)
            waited += max(engine - now, 0.0)
            engine = max(engine, now) + step.push + step.generation
            now = engine - step.generation if server else engine
            launch(step, engine)
        training = draw.choice(run.steps).training
        for is_in in ready[number]:
            waited += max(is_in - now, 0.0)
            now = max(now, is_in) + training / run.parts
        ends.append(now)
        waits.append(waited)
    first = 2 * (lookahead + 1)
    return (ends[-1] - ends[first]) / (PLAYED - first), statistics.mean(waits[first:])


def read(folder: Path) -> TracedRun:
    """The run of a folder, without its first step and those for which nothing was generated. Raises `ConfigError`."""
    path = folder / TRACE_FILE
    try:
        events: list[dict[str, Any]] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read ({type(error).__name__}). Expected a folder of a run with a trace (`trace_steps`)."
        ) from None
    settings = folder / SETTINGS_FILE
    text = settings.read_text(encoding="utf-8") if settings.is_file() else ""
    if re.search("^refill_groups: [1-9]", text, re.MULTILINE):
        raise ConfigError(f"{path} lacks the groups that `refill_groups` replaced. Expected a run without it.")
    if re.search("^partial_rollouts: .*[1-9]", text, re.MULTILINE):
        raise ConfigError(
            f"{path} has generations that `partial_rollouts` left unfinished. Expected a run without it."
        )
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    if any(track.startswith(SERVER_TRACK) for track in tracks.values()):
        raise ConfigError(f"{path} is of a run with vLLM's server. Expected one whose trainer generates by itself.")
    spans = defaultdict[str, list[dict[str, Any]]](list)
    rewards = defaultdict[tuple[int, str], list[dict[str, Any]]](list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        track = tracks[event["pid"], event["tid"]]
        if _REWARD.fullmatch(track):
            rewards[event["pid"], track].append(event)
        elif event["pid"] == 0 and not (track == "steps" and "args" in event):  # not a step that was cut off
            spans["step" if track == "steps" else event["name"]].append(event)
    ended = sorted(reward for (_, track), own in rewards.items() for reward in _ended(track, own))
    size = len({(pid, match[1]) for pid, track in rewards if (match := _REWARD.fullmatch(track))})
    generated = [step for step in spans["step"][1:] if any(_within(step, span) for span in spans[Phase.GENERATION])]
    if len(generated) < 3 or len(ended) < 3 * size:
        raise ConfigError(
            f"{path} has {len(generated)} steps with a generation, and rewards of {len(ended)} completions. Expected "
            "at least 3 steps without `refill_groups`, and rewards of `@per_completion` or `@per_group`."
        )
    # Two waits without training between them are one, as with `max_staleness`.
    ordered = sorted([*spans[Phase.REWARD_WAIT], *spans[Phase.BACKWARD]], key=lambda span: span["ts"])
    turns = [groupby(span["name"] for span in ordered if _within(step, span)) for step in generated]
    parts = max(round(statistics.median(sum(name == Phase.REWARD_WAIT for name, _ in own) for own in turns)), 1)
    places = size / len({pid for pid, _ in rewards})
    batches = [ended[first : first + size] for first in range(0, len(ended) - size + 1, size)]
    generations = spans[Phase.GENERATION]
    measured = [
        {
            phase: sum(span["dur"] for span in spans[phase] if _within(step, span)) / 1e6
            for phase in (Phase.GENERATION, Phase.WEIGHT_PUSH, Phase.REWARD_WAIT, *_NOT_OF_A_STEP)
        }
        for step in generated
    ]
    steps = list[TracedStep]()
    for step, seconds, batch in zip(generated, measured, batches, strict=False):
        begun = [span for span in generations if span["ts"] <= batch[-1][0]] or generations[:1]
        done = (begun[-1]["ts"] + begun[-1]["dur"]) / 1e6
        own = [
            RewardTime(start / 1e6 - done, s, min(int(place * parts / places), parts - 1)) for start, s, place in batch
        ]
        training = step["dur"] / 1e6 - sum(seconds.values())
        steps.append(TracedStep(seconds[Phase.GENERATION], seconds[Phase.WEIGHT_PUSH], training, own))
    took = [
        step["dur"] / 1e6 - sum(own[phase] for phase in _NOT_OF_A_STEP)
        for step, own in zip(generated, measured, strict=True)
    ]
    waited = statistics.mean(own[Phase.REWARD_WAIT] for own in measured)
    return TracedRun(steps=steps, parts=parts, step_s=statistics.mean(took), waited_s=waited)


def _within(step: dict[str, Any], span: dict[str, Any]) -> bool:
    return bool(step["ts"] <= span["ts"] < step["ts"] + step["dur"])


def _ended(track: str, spans: Iterable[dict[str, Any]]) -> Iterable[tuple[float, float, int]]:
    """Start (microseconds), seconds and place of each completion on a track: one begins where a stage comes again."""
    match = _REWARD.fullmatch(track)
    stages, start, end = set[str](), 0.0, 0.0
    for span in [*spans, None]:
        if stages and (span is None or span["name"] in stages):
            yield start, (end - start) / 1e6, int(match[1]) if match else 0
            stages = set()
        if span is not None:
            start, end = (start, end) if stages else (span["ts"], 0.0)
            stages.add(span["name"])
            end = max(end, span["ts"] + span["dur"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the forecasts. Returns the exit code."""
    return exit_code("forecast", argv, _print)


def _print(args: argparse.Namespace) -> None:
    if min(args.lookahead) < 0 or args.slots < 0 or args.deadline < 0:
        raise ConfigError("a number is below 0. Expected 0 or more")
    if args.server and 0 in args.lookahead:
        args.lookahead.remove(0)  # nothing goes on beside training then
    run = read(args.output_dir)
    print(f"measured over {len(run.steps)} steps: {run.step_s:.2f} s a step, {run.waited_s:.2f} s of them waiting")
    print("forecasts, in the order of rows (without max_staleness):")
    for lookahead in args.lookahead:
        seconds, waited = forecast(run, lookahead, slots=args.slots, deadline_s=args.deadline, server=args.server)
        print(f"rollout_lookahead {lookahead}: {seconds:.2f} s a step, {waited:.2f} s of them waiting")
    if args.deadline:
        late = statistics.mean(reward.seconds > args.deadline for step in run.steps for reward in step.rewards)
        print(f"{late:.1%} of the completions have no reward after {args.deadline:g} s.")


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
