"""What a run of `benchmarks.real_model` gives its trainer: the reward, the end, and what is read from its log."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import TrainerCallback

from benchmarks.difficulty import REWARD, Memory
from salesrl_trl import per_completion
from salesrl_trl.ground.process import patched
from salesrl_trl.names import REWARD_OF_ALL


def right_of(memory: Memory, reward_s: float, is_stock: bool) -> Any:
    """The reward: 1 for the right answer, else 0. `memory`: hears of each one."""

    def scored(completion: Any, answer: str, id: str) -> float:
        said = completion[-1]["content"].strip().lower().rstrip(".")
        reward = float(said == answer.lower())
        memory.hear(id, reward)
        return reward

    @per_completion
    async def right(completion: Any, answer: str, id: str) -> float:
        await asyncio.sleep(reward_s)
        return scored(completion, answer, id)

    async def all_right(completions: list[Any], answer: list[str], id: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(reward_s)
        return [scored(*each) for each in zip(completions, answer, id, strict=True)]

    return all_right if is_stock else right


def watch(memory: Memory, calls: int, evaluations: int, ends: bool, seconds: float) -> Any:
    """A callback that notes the seconds of log lines, and evaluates `evaluations` times in a run that scores so many
    completions. `ends`: ends it there. `seconds`: ends it after so many, unless 0."""

    class Watch(TrainerCallback):  # type: ignore[misc]
        done = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began, memory.calls = time.perf_counter(), 0

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                state.log_history[-1] |= {"at_s": time.perf_counter() - self.began, "calls": memory.calls}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= ends and memory.calls >= calls
            control.should_training_stop |= 0 < seconds <= time.perf_counter() - self.began
            if (self.done + 1) * calls <= memory.calls * evaluations and self.done + 1 < evaluations:
                self.done += 1
                control.should_evaluate = True

    return Watch()


def reward_of_all(entry: Mapping[str, float]) -> float:
    """A step's reward of all rows: where some are drawn or trained on more often, not of those."""
    return next(entry[name] for name in (REWARD, REWARD_OF_ALL, "reward") if name in entry)


@contextmanager
def stock_engine(options: dict[str, Any]) -> Iterator[None]:
    """Hands vLLM's engine arguments that TRL has no setting for."""
    if not options:
        yield
        return
    from trl.generation import vllm_generation

    with patched(vllm_generation, "LLM", partial(vllm_generation.LLM, **options)):
        yield
