"""Completions of lengths that depend on the prompt and the number of the sample alone.

Random weights end no completion by themselves, and every arm of a bench has to generate as much. Works with vLLM's
engine in this process and with TRL's client of a server.

    python -m benchmarks.lengths    # decoding steps of a batch, by the share that is left unfinished, simulated
"""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def completion_tokens(prompt: Sequence[int], sample: int, most: int) -> int:
    """Length of a completion: a quarter of `most` at least, then ended with 3 / `most` at each token."""
    draw = random.Random(f"{list(prompt)} {sample}").expovariate(3 / most)
    return min(most // 4 + int(draw), most)


def fix_lengths(engine: Any, most: int, *, seeded: bool = False) -> None:
    """Let vLLM's `LLM` end completions at these lengths. `seeded`: their tokens depend on the weights, the prompt and
    the number of the sample alone."""

    def fixed(ask: Callable[..., Any], prompts: Sequence[dict[str, Any]], sampling_params: Any, **kwargs: Any) -> Any:
        samples: Counter[tuple[int, ...]] = Counter()
        every = []
        for prompt in prompts:
            ids, own = tuple(prompt["prompt_token_ids"]), sampling_params.clone()
            own.max_tokens, own.ignore_eos = completion_tokens(ids, samples[ids], most), True
            if seeded:
                own.seed = samples[ids]
            samples[ids] += 1
            every.append(own)
        return ask(prompts, sampling_params=every, **kwargs)

    engine.generate = functools.partial(fixed, engine.generate)
    engine.enqueue = functools.partial(fixed, engine.enqueue)  # where completions may be left unfinished


def fix_server_lengths(client: Any, most: int) -> None:
    """Let TRL's client of a server ask for completions of these lengths, each in a request of its own.

    Args:
        client (`VLLMClient`):
            Its `generation_kwargs` hold a seed: this package gives the number of the sample by it. The server does not
            get the seed.
        most (`int`):
            Tokens of the longest completion.
    """
    ask = client.generate

    def fixed(
        prompts: Sequence[list[int]], n: int = 1, generation_kwargs: dict[str, Any] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        further = dict(generation_kwargs or {})
        first = further.pop("seed")

        def one(place: tuple[list[int], int]) -> dict[str, Any]:
            prompt, sample = place
            own = {**sampling, "max_tokens": completion_tokens(prompt, first + sample, most)}
            answer: dict[str, Any] = ask([prompt], n=1, generation_kwargs={**further, "ignore_eos": True}, **own)
            return answer

        places = list(itertools.product(prompts, range(n)))
        with ThreadPoolExecutor(len(places)) as pool:
            outputs = list(pool.map(one, places))
        merged = {name: [output[name][0] for output in outputs] for name in outputs[0]}
        return {**merged, "prompt_ids": list(prompts)}

    client.generate = fixed


def decoding_steps(share: float, batches: int = 60, size: int = 64, most: int = 256) -> float:
    """Mean decoding steps of a batch where so large a share of one may be left unfinished (`partial_rollouts`), and
    the engine has slots for it. The first ten batches do not count."""
    running: list[int] = []
    steps, begins = 0, 0
    for batch in range(batches):
        if batch == 10:
            begins = steps
        running += [completion_tokens([batch, place // 8], place % 8, most) for place in range(size)]
        while len(running) > share * size:
            running = [left - 1 for left in running if left > 1]
            steps += 1
    return (steps - begins) / (batches - 10)


if __name__ == "__main__":
    for share in (0.0, 0.125, 0.25, 0.5, 0.75):
        print(f"partial_rollouts {share:g}: {decoding_steps(share):.1f} decoding steps a batch")
