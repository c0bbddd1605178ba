"""A generation engine of a user's own, as it would lie outside of the package."""

import contextlib
import functools

from support.loopback import action

from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.generation.sampler import ready


class Writer:
    """Writes actions, each with another query. Greedily it always writes the same one."""

    def __init__(self, upstream):
        self.upstream = upstream
        self.is_greedy = False
        self.written = []
        self.weights = []
        self.tokenizer = packaged_tokenizer()

    def start(self, prompts, finished, *, ahead):
        return ready(self.upstream.generate(prompts, tokens=functools.partial(self.write, finished)))

    def write(self, finished, prompt_ids, num_generations):
        self.weights.append(sum(each.sum().item() for each in self.upstream.model().parameters()))
        completions = []
        for place in range(len(prompt_ids)):
            self.written.append("greedy" if self.is_greedy else f"query {len(self.written)}")
            ids = self.tokenizer(action(self.written[-1]))["input_ids"]
            completions.append([*ids, self.upstream.eos_token_ids[0]])
            finished(place, completions[-1])
        return completions, None

    @contextlib.contextmanager
    def greedily(self):
        self.is_greedy = True
        try:
            yield
        finally:
            self.is_greedy = False


class NoEngine:
    """Lacks both methods."""
