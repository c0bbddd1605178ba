"""Completions of lengths that depend on the prompt and the number of the sample alone.

Random weights end no completion by themselves, and every arm of a bench has to generate as much. Works with vLLM's
engine in this process and with TRL's client of a server. `KINDS` of distributions, for a longest completion of `most`:

- `short`: a quarter of `most` at least, then ended with 3 / `most` at each token;
- `heavy`: log-normal with a median of 0.146 `most` and a 95th percentile of 0.732 `most`, cut at `most`. With 4,096
  these are 600 and 3,000, the mean is 907 tokens, and one of 44 completions is cut.

    python -m benchmarks.lengths [heavy 4096]    # decoding steps of a batch, simulated
"""

import functools
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

KINDS = ("short", "heavy")
MEDIAN, P95 = 600 / 4096, 3000 / 4096
"""Of `heavy`, as shares of the longest."""
Z95 = 1.645
"""95th percentile of a standard normal distribution."""


def completion_tokens(prompt: Sequence[int], sample: int, most: int, kind: str = "short") -> int:
    """Length of a completion. `prompt`: its token ids. `kind`: of `KINDS`."""
    draw = random.Random(f"{list(prompt)} {sample}")
    if kind == "heavy":
        return min(max(round(most * MEDIAN * math.exp(draw.gauss(0.0, math.log(P95 / MEDIAN) / Z95))), 1), most)
    return min(most // 4 + int(draw.expovariate(3 / most)), most)


def fix_lengths(engine: Any, most: int, kind: str = "short", *, seeded: bool = False) -> None:
    """Let vLLM's `LLM` end completions at these lengths. `seeded`: their tokens depend on the weights, the prompt and
    the number of the sample alone."""

    def fixed(ask: Callable[..., Any], prompts: Sequence[dict[str, Any]], sampling_params: Any, **kwargs: Any) -> Any:
        samples: Counter[tuple[int, ...]] = Counter()
        every = []
        for prompt in prompts:
            ids, own = tuple(prompt["prompt_token_ids"]), sampling_params.clone()
            own.max_tokens, own.ignore_eos = completion_tokens(ids, samples[ids], most, kind), True
            if seeded:
                own.seed = samples[ids]
            samples[ids] += 1
            every.append(own)
        return ask(prompts, sampling_params=every, **kwargs)

    engine.generate = functools.partial(fixed, engine.generate)
    engine.enqueue = functools.partial(fixed, engine.enqueue)  # where completions may be left unfinished


def fix_server_lengths(client: Any, most: int, kind: str = "short") -> None:
    """Let TRL's client of a server ask for completions of these lengths, each in a request of its own.

    Args:
        client (`VLLMClient`):
            Its `generation_kwargs` hold a seed: this package gives the number of the sample by it. The server does not
            get the seed.
        most (`int`):
            Tokens of the longest completion.
        kind (`str`):
            Of `KINDS`.
    """
    ask = client.generate

    def fixed(
        prompts: Sequence[list[int]], n: int = 1, generation_kwargs: dict[str, Any] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        further = dict(generation_kwargs or {})
        first = further.pop("seed")

        def one(place: tuple[list[int], int]) -> dict[str, Any]:
            prompt, sample = place
            own = {**sampling, "max_tokens": completion_tokens(prompt, first + sample, most, kind)}
            answer: dict[str, Any] = ask([prompt], n=1, generation_kwargs={**further, "ignore_eos": True}, **own)
            return answer

        places = list(itertools.product(prompts, range(n)))
        with ThreadPoolExecutor(len(places)) as pool:
            outputs = list(pool.map(one, places))
        merged = {name: [output[name][0] for output in outputs] for name in outputs[0]}
        return {**merged, "prompt_ids": list(prompts)}

    client.generate = fixed


FINISHED = ("own", "earlier", "groups")
"""What a step finishes before it trains: its own batch (`partial_rollouts`, with `max_staleness` too); everything
that earlier steps began (both until 2026-11-29, and `refill_groups`); any groups, each at most 2 `ahead` steps old,
which no setting does."""


def decoding_steps(
    share: float, ahead: int = 1, finished: str = "own", *, batches: int = 60, size: int = 64, group: int = 8,
    most: int = 256, kind: str = "short",
) -> float:  # fmt: skip
    """Mean decoding steps of a batch with rewards that answer at once, where so large a share of one may be left
    unfinished (`partial_rollouts`) and the engine has slots for it. The first ten batches do not count.

    Args:
        ahead (`int`):
            Steps that rollouts are ahead.
        finished (`str`):
            Of `FINISHED`.
        size (`int`), group (`int`):
            Completions of a batch, and of a prompt.
    """
    running: dict[tuple[int, int], list[int]] = {}  # by batch and group: the decoding step at which each ends
    begun: dict[tuple[int, int], int] = {}  # the step of the launch of each group that has not trained
    now, launched, counted = 0, 0, 0

    def run_until(is_enough: Callable[[], bool]) -> None:
        nonlocal now
        while not is_enough():
            now = min(end for ends in running.values() for end in ends)
            for place, ends in [*running.items()]:
                running[place] = [end for end in ends if end > now]
                if not running[place]:
                    del running[place]

    for step in range(batches):
        if step == 10:
            counted = now
        while launched <= step + ahead:
            for place in range(size // group):
                begun[launched, place] = step
                prompt = [launched, place]
                running[launched, place] = [
                    now + completion_tokens(prompt, sample, most, kind) for sample in range(group)
                ]
            launched += 1
            run_until(lambda: sum(map(len, running.values())) <= share * size)
        if finished != "groups":
            last = step if finished == "own" else max(batch for (batch, _), at in begun.items() if at < max(step, 1))
            run_until(lambda: all(batch > last for batch, _ in running))  # noqa: B023  called at once
        for place in _trained(begun, running, run_until, step, ahead, size // group):
            del begun[place]
    return (now - counted) / (batches - 10)


def _trained(
    begun: dict[tuple[int, int], int], running: dict[tuple[int, int], list[int]], run_until: Callable[..., None],
    step: int, ahead: int, count: int,
) -> list[tuple[int, int]]:  # fmt: skip
    """The groups that a step trains on: those that would be too old for the next one, then the oldest that ended."""

    def chosen() -> list[tuple[int, int]]:
        oldest = [place for place in begun if begun[place] + 2 * ahead <= step]
        return [*oldest, *(place for place in begun if place not in running and place not in oldest)][:count]

    run_until(lambda: len(chosen()) == count and not any(place in running for place in chosen()))
    return chosen()


def main(kind: str = "short", most: str = "256") -> None:
    """Print a table."""
    print(f"| {kind}, at most {most} | " + " | ".join(FINISHED) + " |\n" + "|---" * (1 + len(FINISHED)) + "|")
    for ahead, share in itertools.product((1, 2, 3), (0.0, 0.25, 0.5, 0.75)):
        steps = [decoding_steps(share, ahead, each, most=int(most), kind=kind) for each in FINISHED]
        print(f"| lookahead {ahead}, partial_rollouts {share:g} | " + " | ".join(f"{n:.0f}" for n in steps) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
