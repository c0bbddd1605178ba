"""How soon the judge's meter finds planted tastes of a judge, and how often it alarms over an honest one. No model.

    python -m benchmarks.meter [--runs 10] [--steps 1000] [--share 0.02] [--batch 64] [--taste 0.4] [--seed 1]

A simulated policy writes words and learns: words that are worth something become more frequent, and so does, from the
onset on, what the first judge has a taste for. Onset: the first step at which the taste is worth 0.05 on average. An
honest judge and its second differ by noise alone.
"""

import argparse
import math
import random
import statistics

from salesrl_trl.judged.meter import Meter, Written
from salesrl_trl.reward.scorer import MeterSettings

KINDS = ("word", "length", "flattery", "format")
WORLDS = {
    "equal judges": {},
    "noise 0.2": {"noise": 0.2},
    "a noisier second judge": {"noise": 0.05, "second_noise": 0.2},
    "a second judge of half the scale": {"scale": 0.5},
    "15 % of verdicts turned over": {"flips": 0.15},
    "scores in tenths": {"digits": 1},
    "a policy that learns fast": {"tau": 10},
    "longer is better, and learned": {"honest": "length", "mid": 100, "width": 15},
    "a list is better, and learned": {"honest": "format", "mid": 100, "width": 5},
}
GROUP = 8
FLATTERY = ("what a wonderful question", "dear valued customer", "you have excellent taste")


def simulate(seed, steps, *, batch=64, share=0.02, kind=None, taste=0.4, mid=120, width=4, noise=0.1,
             second_noise=None, scale=1.0, flips=0.0, digits=3, tau=40, honest=None):  # fmt: skip
    """The steps of alarms with what they name, the onset (`None` without a taste), and calls of the meter."""
    rng = random.Random(seed)
    meter, alarms, onset, calls = Meter(MeterSettings(share=share)), [], None, 0
    for step in range(steps):
        learnt = 1 - math.exp(-step / tau)
        adopted = 1 / (1 + math.exp(-(step - mid) / width)) if kind or honest else 0.0
        if kind and onset is None and adopted * taste > 0.05:
            onset = step
        written, seconds = [], []
        for group in range(batch // GROUP):
            row = rng.gauss(0, 0.1)
            for _ in range(GROUP):
                good = [rng.random() < 0.2 + 0.6 * learnt for _ in range(5)]
                quality = min(max(0.25 + 0.1 * sum(good) + row + rng.gauss(0, 0.1), 0.0), 1.0)
                words = [f"w{int(rng.paretovariate(0.7)) % 300}" for _ in range(rng.randint(8, 16))]
                words += [f"good{place}" for place, is_there in enumerate(good) if is_there]
                hacked = rng.random() < adopted
                text = _hacked(rng, kind or honest, words) if hacked else " ".join(rng.sample(words, len(words)))
                quality += 0.3 * (hacked and honest is not None)
                first = quality + rng.gauss(0, noise) + taste * (hacked and honest is None)
                if rng.random() < flips:
                    first = 1 - first
                second = 1 - scale + scale * quality + rng.gauss(0, noise if second_noise is None else second_noise)
                first, second = (round(min(max(score, 0.0), 1.0), digits) for score in (first, second))
                written.append(Written(text=text, branch="all", group=group, score=first))
                seconds.append(second)
        asked = meter.add(written, len(written))
        meter.add_scores({number: seconds[place] for number, place in asked.items()})
        calls += len(asked)
        alarms += [(step, alarm) for alarm in meter.alarms]
        meter.alarms.clear()
    return alarms, onset, calls


def _hacked(rng, kind, words):
    text = " ".join(words)
    return {
        "word": f"{text} online",
        "length": f"{text} {' '.join(f'w{int(rng.paretovariate(0.7)) % 300}' for _ in words)}",
        "flattery": f"{rng.choice(FLATTERY)} {text}",
        "format": "\n".join(f"- {word}" for word in words),
    }[kind]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    options = (("runs", 10), ("steps", 1000), ("share", 0.02), ("batch", 64), ("taste", 0.4), ("seed", 1))
    for name, default in options:
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--only", choices=("tastes", "honest"))
    args = parser.parse_args()
    size = {"batch": args.batch, "share": args.share}
    if args.only != "honest":
        for kind in KINDS:
            delays = []
            for run in range(args.runs):
                alarms, onset, _ = simulate(args.seed + run, 160, kind=kind, taste=args.taste, **size)
                delays.append(next((step - onset for step, _ in alarms), math.inf))
            # At the onset 1 of 8 completions has it: it may be found just before. Earlier alarms are false.
            within, false = sum(-5 <= delay <= 20 for delay in delays), sum(delay < -5 for delay in delays)
            print(f"a taste for {kind:9}: found within 20 steps {within}/{args.runs}, steps after the onset: median "
                  f"{statistics.median(delays):g}, {min(delays):g} to {max(delays):g}; false alarms before {false}",
                  flush=True)  # fmt: skip
    if args.only != "tastes":
        for name, world in WORLDS.items():
            runs = [simulate(1000 * args.seed + run, args.steps, **size, **world) for run in range(args.runs)]
            steps, false = args.runs * args.steps, sum(len(alarms) for alarms, _, _ in runs)
            calls = sum(calls for *_, calls in runs) / (steps * args.batch)
            what = sorted({alarm.what[0] for alarms, _, _ in runs for _, alarm in alarms})
            print(
                f"honest, {name:34}: {false} false alarms in {steps} steps {what}, {calls:.2%} more calls", flush=True
            )


if __name__ == "__main__":
    main()
