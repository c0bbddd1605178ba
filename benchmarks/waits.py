"""Seconds of a step with long completions and slow rewards, simulated: what waits for what with `partial_rollouts`.

    python -m benchmarks.waits [--rewards 5.6 3.2] [--decoding 0.0062] [--passes 7.4]

8 groups of 8 completions a step, lengths of `benchmarks.lengths`, at most half a batch unfinished. The variants:

- `alone`: `partial_rollouts` without staleness; the others with `max_staleness: 2 N`;
- `both before`: a step finished everything that earlier steps had begun, until 2026-11-29;
- `both`: it finishes its own batch, and later batches that have ended may train early;
- `groups`: it finishes no batch, and any whole group may train, which no setting does;
- `, decoding`: vLLM decodes what is unfinished while a step waits for rewards, as it does now.

A decoding step takes the same time whatever the engine decodes.

    python -m benchmarks.waits --automatic

has the lookahead chosen by `parts.lookahead`, from 1 on and at most 6, for `alone, decoding`: with the time in which
nothing is decoded as the wait (until 2026-11-29), and with all of the wait.
"""

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from benchmarks.lengths import completion_tokens
from salesrl_trl.names import REWARD_EXPOSED, REWARD_SECONDS, STEP_SECONDS
from salesrl_trl.parts.lookahead import LookaheadPart
from salesrl_trl.rollout.buffer import first_in

COUNT, SIZE = 8, 8
"""Groups of a step, and completions of a group."""
SPREAD = 0.25
"""Standard deviation of a wait's logarithm, as in `benchmarks.service`."""
SKIPPED = 12
"""Steps before the first one that counts."""
VARIANTS = ("alone", "alone, decoding", "both before", "both", "both, decoding", "groups, decoding")
Group = tuple[int, int]
"""A batch and a place in it."""


class Simulated:
    """A trainer and its engine. `rewards`: medians of a reward's two waits; `decoding`, `passes`: seconds."""

    def __init__(self, rewards: Iterable[float], decoding: float, passes: float, most: int = 4096) -> None:
        self._rewards, self._decoding, self._passes, self._most = tuple(rewards), decoding, passes, most
        self.now = 0.0
        self._running: dict[tuple[Group, int], int] = {}  # tokens to go
        self._scored: dict[Group, list[float]] = {}  # when each of the completions that have ended has its reward
        self._version: dict[Group, int] = {}  # the step of the launch
        self._first: dict[int, float] = {}  # when a batch's first completion ended

    def _launch(self, batch: int, step: int) -> None:
        for place in range(COUNT):
            group = batch, place
            self._version[group], self._scored[group] = step, []
            for sample in range(SIZE):
                self._running[group, sample] = completion_tokens(group, sample, self._most, "heavy")

    def _decode(self, steps: int) -> None:
        """Advance the engine, at most until a completion ends."""
        steps = min(steps, *self._running.values())
        self.now += steps * self._decoding
        for (group, sample), left in [*self._running.items()]:
            self._running[group, sample] = left - steps
            if left == steps:
                del self._running[group, sample]
                self._first.setdefault(group[0], self.now)
                draw = random.Random(f"{group} {sample} wait")
                waits = (median * math.exp(draw.gauss(0.0, SPREAD)) for median in self._rewards)
                self._scored[group].append(self.now + sum(waits))

    def _decode_until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            self._decode(self._most)

    def _is_open(self, batch: int) -> bool:
        return any(group[0] == batch for group, _ in self._running)

    def _is_in(self, group: Group) -> bool:
        scored = self._scored[group]
        return len(scored) == SIZE and max(scored) <= self.now

    def _seen(self, variant: str, step: int) -> list[Group]:
        """The groups that a step chooses among."""
        batches = sorted({batch for batch, _ in self._version})
        if variant.startswith("groups"):
            last = batches[-1]
        elif variant.startswith("alone"):
            last = step
        else:
            opened = (batch for batch in batches if batch > step and self._is_open(batch))
            last = next(opened, batches[-1] + 1) - 1
        return sorted((group for group in self._version if group[0] <= last), key=lambda g: (self._version[g], g))

    def step_s(
        self, ahead: int, variant: str, unfinished: float = 0.5, steps: int = 50,
        choose: Callable[[float, float, float, float], int] | None = None,
    ) -> float:  # fmt: skip
        """Mean seconds of a step. `choose`: the next lookahead, by seconds of the step, of its wait, in which nothing
        was decoded, and of its batch's rewards."""
        ends, launched = [0.0], 0
        for step in range(steps):
            while launched <= step + ahead:
                self._launch(launched, step)
                launched += 1
                self._decode_until(lambda: len(self._running) <= unfinished * COUNT * SIZE)
            if not variant.startswith("groups"):
                self._decode_until(lambda: not self._is_open(step))  # noqa: B023  called at once
            if variant == "both before":
                begun = {group[0] for group, version in self._version.items() if version < step}
                self._decode_until(lambda: not any(map(self._is_open, begun)))  # noqa: B023  called at once
            seen, chosen = self._seen(variant, step), list[Group]()
            oldest = ahead if variant.startswith("alone") else 2 * ahead
            latest = [self._version[group] + oldest for group in seen]
            began, idle = self.now, 0.0
            while not chosen:
                is_in = [self._is_in(group) for group in seen]
                places = first_in(latest, is_in, range(step + 1, step + ahead + 2), COUNT)
                chosen = [seen[place] for place in places]
                if not chosen:
                    idle += self._wait(seen, decodes="decoding" in variant)
            waited, last = self.now - began, max(max(self._scored[group]) for group in chosen)
            for group in chosen:
                del self._version[group], self._scored[group]
            self.now += self._passes
            ends.append(self.now)
            if choose is not None:
                ahead = choose(ends[-1] - ends[-2], waited, idle, last - self._first[step])
        return (ends[-1] - ends[SKIPPED + 1]) / (len(ends) - 2 - SKIPPED)

    def _wait(self, seen: list[Group], decodes: bool) -> float:
        """Until the next reward of these groups, or until a completion ends. Returns the seconds without decoding."""
        due = min((at for group in seen for at in self._scored[group] if at > self.now), default=math.inf)
        steps = (due - self.now) / self._decoding
        if decodes and self._running and steps >= 1:
            self._decode(int(min(steps, self._most)))
            return 0.0
        idle, self.now = due - self.now, due
        return idle


def automatic() -> LookaheadPart:
    """The part that chooses the lookahead, from 1 on and at most 6."""
    part, settings = LookaheadPart(), SimpleNamespace(rollout_lookahead=1, most_lookahead=6)
    part.connect(SimpleNamespace(pipeline=None, least_lookahead=1, args=settings))  # type: ignore[arg-type]
    return part


def main() -> None:
    """Print a table."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rewards", nargs=2, type=float, default=(5.6, 3.2), help="median seconds of the two waits")
    made.add_argument("--decoding", type=float, default=0.0062, help="seconds of a decoding step")
    made.add_argument("--passes", type=float, default=7.4, help="seconds of the passes and the push")
    made.add_argument("--automatic", action="store_true", help="choose the lookahead")
    args = made.parse_args()
    if args.automatic:
        for counts_all in (False, True):
            part, chosen = automatic(), list[int]()

            def choose(step: float, waited: float, idle: float, rewards: float) -> int:
                wait = waited if counts_all else idle  # noqa: B023  called at once
                figures = {STEP_SECONDS: step, REWARD_EXPOSED: wait, REWARD_SECONDS: rewards}
                chosen.append(part.next(figures))  # noqa: B023  the same
                return chosen[-1]  # noqa: B023  the same

            simulated = Simulated(args.rewards, args.decoding, args.passes)
            seconds = simulated.step_s(1, "alone, decoding", steps=120, choose=choose)
            print(f"{'all of the wait' if counts_all else 'idle'}: {seconds:.1f} s a step, lookahead {chosen[11::12]}")
        return
    print("| | " + " | ".join(VARIANTS) + " |\n" + "|---" * (1 + len(VARIANTS)) + "|")
    for ahead in (1, 2, 3, 4):
        seconds = (Simulated(args.rewards, args.decoding, args.passes).step_s(ahead, name) for name in VARIANTS)
        print(f"| lookahead {ahead} | " + " | ".join(f"{each:.1f}" for each in seconds) + " |", flush=True)
    whole = statistics.mean(
        Simulated(args.rewards, args.decoding, args.passes).step_s(ahead, "alone", 0.0) for ahead in (1, 2, 3)
    )
    print(f"without `partial_rollouts`, lookahead 1 to 3: {whole:.1f}")


if __name__ == "__main__":
    main()
