"""The figures of `benchmarks.pipeline`: from blocks of steps to means, and to a table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from salesrl_trl.names import Phase
from salesrl_trl.reward.batch import RewardBatch
from salesrl_trl.timing import overlap


def hidden_share(batch: RewardBatch) -> float:
    """The share of a batch's time, from its first call to its last answer, in which the trainer did not wait."""
    if batch.began is None or (ended := max(batch.ended)) <= batch.began:
        return math.nan
    return 1.0 - sum(overlap((batch.began, ended), wait) for wait in batch.waits) / (ended - batch.began)


def figures_of(blocks: Mapping[str, Sequence[Mapping[str, Sequence[Any]]]]) -> dict[str, dict[str, Any]]:
    """By arm: means over all counted steps of its blocks, and the ratio to stock's step."""
    found = {
        arm: {name: [value for block in of_arm for value in block[name]] for name in of_arm[0]}
        for arm, of_arm in blocks.items()
    }
    stock = statistics.mean(found["stock"]["step_s"]) if "stock" in found else math.nan
    return {
        arm: {
            "step_s_median": statistics.median(each["step_s"]),
            "step_s_mean": statistics.mean(each["step_s"]),
            "ratio": statistics.mean(each["step_s"]) / stock,
            "hidden": statistics.mean(each["hidden"]),
            "reward_failures": sum(each["failures"]),
            "completion_tokens": statistics.mean(each["lengths"]),
            "peak_gib": max(each["peak_gib"]),
            "decoding": statistics.mean(each["decoding"]),
            "phases_s": dict(zip(Phase, map(statistics.mean, zip(*each["phases"], strict=True)), strict=True)),
            "step_s": each["step_s"],
        }
        for arm, each in found.items()
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rag_s, judge_s = figures["latency_s"]
    lines = [
        f"{figures['device']}, {figures['shape']}, prompts of {figures['prompt_tokens']} tokens, "
        f"rewards of {rag_s:g} s + {judge_s:g} s",
        f"{'arm':16}{'step, s':>9}{'mean, s':>9}{'of stock':>9}{'hidden':>8}{'failures':>9}{'tokens':>7}{'peak':>7}"
        f"{'decoding':>9}",
    ]
    for arm, each in figures["arms"].items():
        lines.append(
            f"{arm:16}{each['step_s_median']:9.2f}{each['step_s_mean']:9.2f}{each['ratio']:9.3f}"
            f"{each['hidden']:8.0%}{each['reward_failures']:9d}{each['completion_tokens']:7.0f}{each['peak_gib']:7.1f}"
            f"{each['decoding']:9.0f}"
        )
        if "floor" in arm:
            spent = {phase: seconds for phase, seconds in each["phases_s"].items() if seconds >= 0.005}
            lines.append("    " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in spent.items()))
    if figures["floor_s"] is not None:
        share = figures["instruments_share"]
        lines.append(f"of the floor's {figures['floor_s']:.2f} s in the instruments: {share:.2%}")
    return "\n".join(lines)
