"""What all arms share: prompts, lengths of completions, rewards, and which steps count.

Needs the standard library alone, because each arm runs in an environment of its own.

- A step trains on 8 prompts with 8 completions each.
- A prompt has a number of tokens that is the same for all. Its row says how long the two calls of its reward take.
- A completion's length is drawn as in `benchmarks.lengths`, from the prompt's token ids in `prompts.json`. Where an
  arm numbers a prompt's samples, the same sample has the same length in all arms; else the distribution is the same.
- The texts repeat with a period that divides the counted steps, so that all arms' counted steps have the same prompts.
- A reward takes two waits one after the other, log-normal as in `benchmarks.service`, and depends on the text alone.
- The rows come in blocks, one for each latency, and are not shuffled. An arm that reads `ahead` steps ahead mixes two
  blocks at their border, so the first `ahead + 2` steps and the last `ahead` steps of a block do not count.
"""

import asyncio
import functools
import json
import math
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lengths import completion_tokens

PROMPTS = 8
"""Prompts of a step."""
GROUP = 8
"""Completions of a prompt."""
RANK = 16
"""Of the LoRA adapter."""
TEMPLATE = 64
"""More tokens than a chat template adds."""
SPREAD = 0.25
"""Standard deviation of a wait's logarithm."""
RATE = 1e-6
"""Learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One arm's run, as it stands in its file.

    Args:
        arm (`str`):
            Its name.
        folder (`str`):
            Weights, tokenizer, `texts.json`, a list of prompts, and `prompts.json`, their token ids.
        prompt_tokens (`int`):
            Tokens of a prompt, without the chat template.
        tokens (`int`):
            Longest completion.
        lengths (`str`):
            Of `benchmarks.lengths.KINDS`.
        micro_batch (`int`):
            Completions of a micro-batch.
        latencies (`list[list[float]]`):
            Median seconds of a reward's two calls, one pair for each block.
        ahead (`int`):
            Steps that rollouts may be ahead of training; 0 for an arm that waits.
        warm (`int`):
            Steps before the first block that do not count.
        measured (`int`):
            Counted steps of a block.
        full (`bool`):
            All weights are trained, not an adapter.
        dtype (`str`):
            Of the trainer's weights. Passes are in bfloat16 on a GPU.
        processes (`int`):
            Processes of the trainer, a card each. Each has its own engine, and trains on as much as one alone.
        url (`str`):
            Address of vLLM's server, without `/v1`, for the arms that use one.
        run (`str`):
            Folder of the run of this package's arms.
    """

    arm: str
    folder: str
    prompt_tokens: int
    tokens: int
    latencies: list[list[float]]
    lengths: str = "short"
    micro_batch: int = 8
    ahead: int = 0
    warm: int = 3
    measured: int = 3
    full: bool = False
    dtype: str = "bfloat16"
    processes: int = 1
    url: str = ""
    run: str = ""

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_tokens + TEMPLATE + self.tokens

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return PROMPTS * GROUP // self.micro_batch

    @property
    def skipped(self) -> int:
        """Steps at a block's start that do not count: those whose batches the first one began, and the next one, whose
        rewards had only these short steps to come in."""
        return self.ahead + 1 + bool(self.ahead)

    @property
    def block(self) -> int:
        """Steps of a block."""
        return self.skipped + self.measured + self.ahead

    @property
    def steps(self) -> int:
        """All steps of the run."""
        return self.warm + self.block * len(self.latencies)

    @property
    def last_counted(self) -> int:
        """Steps until all figures are there. An arm ends then."""
        return self.steps - self.ahead

    def rows(self) -> list[dict[str, Any]]:
        """One row for each prompt, in the order of training."""
        texts = json.loads(Path(self.folder, "texts.json").read_text())
        latency = [self.latencies[0]] * self.warm + [each for each in self.latencies for _ in range(self.block)]
        return [
            {"row": row, "text": texts[row % len(texts)], "rag_s": rag_s, "judge_s": judge_s}
            for row, (rag_s, judge_s) in enumerate(each for each in latency for _ in range(PROMPTS * self.processes))
        ]

    def length(self, row: int, sample: int) -> int:
        """Tokens of a completion."""
        ids = prompts_of(self.folder)
        return completion_tokens(ids[row % len(ids)], sample, self.tokens, self.lengths)

    def batches(self) -> list[list[int]]:
        """Tokens of the completions of as many steps as count, from the first row on."""
        steps = [range(first, first + PROMPTS) for first in range(0, PROMPTS * self.measured, PROMPTS)]
        return [[self.length(row, sample) for row in rows for sample in range(GROUP)] for rows in steps]

    def conversations(self) -> list[dict[str, Any]]:
        """The rows as TRL takes them."""
        return [{**row, "prompt": [{"role": "user", "content": row["text"]}]} for row in self.rows()]

    def figures(self, seconds: Sequence[float]) -> list[dict[str, Any]]:
        """Seconds of the counted steps of each block.

        Args:
            seconds (`Sequence[float]`):
                Of each step of the run, from its predecessor's end to its own. A run that was cut off has fewer.
        """
        found = []
        for place, latency in enumerate(self.latencies):
            start = self.warm + place * self.block + self.skipped
            counted = [round(value, 3) for value in seconds[start : start + self.measured]]
            mean = round(statistics.mean(counted), 3) if counted else None
            found.append({"latency_s": latency, "counted": len(counted), "mean_s": mean, "step_s": counted})
        return found

    def write(self, path: Path) -> None:
        """Write it to its file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read it from its file."""
        return cls(**json.loads(path.read_text()))


@functools.cache
def prompts_of(folder: str) -> list[list[int]]:
    """Token ids of the prompts."""
    return json.loads(Path(folder, "prompts.json").read_text())  # type: ignore[no-any-return]


def write_result(path: Path, plan: Plan, seconds: Sequence[float], **more: Any) -> None:
    """Write an arm's figures to a file. The file of a run that goes on is written anew."""
    result = {
        "arm": plan.arm, "prompt_tokens": plan.prompt_tokens, "ahead": plan.ahead, "full": plan.full,
        "processes": plan.processes, "dtype": plan.dtype, "blocks": plan.figures(seconds),
        "all_s": [round(value, 3) for value in seconds], **more,
    }  # fmt: skip
    write_whole(path, result)


def write_whole(path: Path, found: Any) -> None:
    """Write a file of JSON, which other benches may read or write at the same time: they find a whole one."""
    whole = path.with_name(f".{os.getpid()}.{path.name}")
    whole.write_text(json.dumps(found))
    whole.replace(path)


def text_of(completion: Any) -> str:
    """The text of a completion, which may be a conversation."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def score_of(text: str) -> float:
    """A reward between 0 and 1."""
    return random.Random(text).random()


async def scored(text: str, rag_s: float, judge_s: float) -> float:
    """The reward of a text, after the two waits."""
    draw = random.Random(f"{text} wait")
    for median_s in (rag_s, judge_s):
        await asyncio.sleep(median_s * math.exp(draw.gauss(0.0, SPREAD)))
    return score_of(text)


async def batch_scored(
    prompts: Sequence[Any], completions: Sequence[Any], rag_s: Sequence[float], judge_s: Sequence[float], **_: Any
) -> list[float]:
    """The rewards of a batch, as TRL calls for them: all waits at once."""
    texts = map(text_of, completions)
    return await asyncio.gather(*(scored(*each) for each in zip(texts, rag_s, judge_s, strict=True)))
