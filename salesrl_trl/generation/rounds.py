"""The loop over transformers' `generate`: each round generates all pending turns of conversations together.

Nothing is left for later: a batch of conversations is over when it has run.
"""

from collections.abc import Callable
from typing import Any

from salesrl_trl.generation.tasks import TaskBatch, Turn, TurnLoop

Generate = Callable[[list[list[int]], None, dict[str, Any], int], tuple[list[list[int]], list[list[float]] | None]]
"""TRL's `_generate_single_turn`: from token ids of prompts, without pictures, to those of completions."""


class Rounds(TurnLoop):
    """`most` returns the highest of a number over all ranks, where they generate together because the policy is in
    parts; the number itself where each generates alone."""

    leaves_conversations = False

    def __init__(self, generate: Generate, most: Callable[[int], int]) -> None:
        super().__init__()
        self._generate, self._most = generate, most

    def run(self, batch: TaskBatch[Any], *, ahead: bool = False) -> None:
        prompts = [[0]]  # of the last round: a rank that asks for nothing generates once more while others ask
        while True:
            with self.changed:
                self.changed.wait_for(lambda: batch.is_over or len(self._waiting) >= batch.under_way)
            tasks = sorted((task for group in self._take() for task in group), key=lambda task: task.place)
            if not self._most(len(tasks)):
                return
            prompts = [task.ids for task in tasks] or prompts[:1]
            completion_ids, logprobs = self._generate(prompts, None, {}, 1)
            for number, task in enumerate(tasks):
                task.answer.set_result(Turn(completion_ids[number], None if logprobs is None else logprobs[number]))
