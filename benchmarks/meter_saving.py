"""What the judge's meter saves of the true reward: a policy that learns a judge's taste, with the meter's actions.

    python -m benchmarks.meter_saving [--seeds 16] [--steps 150] [--taste 0.4] [--noise 0.15] [--share 0.02]

The policies, rewards and training are those of `benchmarks.judging`: 64 completions a step in groups of 8. The judge
likes word 0 in the first place, which is mostly wrong, and which the policy seldom writes at first. A second judge has
the same noise and no taste; the meter asks it for a share of the completions. *stop* ends a run at the meter's first
alarm. *weight* lets the judge's weight fall to a half from then on, and the second judge's rise to a half: it then
scores every completion. *second* has the second judge alone from then on.
"""

import argparse
import statistics

import torch

from benchmarks.judging import Policies, interval, judged
from salesrl_trl.judged.meter import Meter, Written
from salesrl_trl.reward.scorer import MeterSettings

WEIGHTS = {"go on": 1.0, "weight": 0.5, "second": 0.0}
"""The first judge's weight after the alarm."""


def course(seed, arm, args):
    """The held-out true reward before each step and at the end, and the step of the first alarm, or `None`."""
    policies, alarm, rewards = Policies([seed], args.rate), None, []
    meter = Meter(MeterSettings(share=args.share))
    for step in range(args.steps):
        rewards.append(policies.held_out_reward().item())
        prompts, words, truth, tasty = policies.sample()
        first = judged(policies, truth, tasty, noise=args.noise, taste=args.taste)
        second = judged(policies, truth, tasty, noise=args.noise)
        rows = [
            Written(text=" ".join(f"place{place}word{word}" for place, word in enumerate(own)), branch="all",
                    group=number, score=score)
            for number, (group, scores) in enumerate(zip(words[0].tolist(), first[0].tolist(), strict=True))
            for own, score in zip(group, scores, strict=True)
        ]  # fmt: skip
        sure = second.flatten().tolist()
        asked = meter.add(rows, len(rows))
        meter.add_scores({number: sure[place] for number, place in asked.items()})
        if meter.alarms and alarm is None:
            alarm = step
            first_alarm = meter.alarms[0].what
        meter.alarms.clear()
        weight = 1.0 if alarm is None else WEIGHTS[arm]
        scores = weight * first + (1 - weight) * second
        advantages = (scores - scores.mean(-1, keepdim=True)) / (scores.std(-1, keepdim=True) + 1e-4)
        policies.train(prompts, words, advantages, torch.ones(1, dtype=torch.bool))
    rewards.append(policies.held_out_reward().item())
    return rewards, alarm, None if alarm is None else first_alarm


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    options = (("seeds", 16), ("steps", 150), ("taste", 0.4), ("noise", 0.15), ("share", 0.02), ("rate", 0.05))
    for name, default in options:
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    courses = {arm: [course(seed, arm, args) for seed in range(args.seeds)] for arm in WEIGHTS}
    alone = courses["go on"]
    alarms = [alarm for _, alarm, _ in alone]
    right = sum(what is not None and what[1] == "place0word0" for *_, what in alone)
    found = sorted(alarm for alarm in alarms if alarm is not None)
    print(f"{len(found)} of {args.seeds} runs have an alarm, {right} of them first over the taste; step: {found}")
    ends = {arm: [rewards[-1] for rewards, *_ in runs] for arm, runs in courses.items()}
    ends["stop"] = [rewards[-1 if alarm is None else alarm + 1] for rewards, alarm, _ in alone]
    best = [max(rewards) for rewards, *_ in alone]
    print(f"before {statistics.fmean(rewards[0] for rewards, *_ in alone):.3f}, best {statistics.fmean(best):.3f}")
    for arm, values in ends.items():
        less = [value - other for value, other in zip(values, ends["go on"], strict=True)]
        middle, half = interval(less)
        print(f"{arm:7}: {statistics.fmean(values):.3f} at its end, less going on {middle:+.3f} +- {half:.3f}")


if __name__ == "__main__":
    main()
