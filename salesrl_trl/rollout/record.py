"""A scored rollout as plain values, for the record of a run.

Owns which values these are. `rollout.rollout_scoring` calls it; the recorder writes them beside training.
"""

from collections.abc import Sequence

import torch
from accelerate import PartialState

from salesrl_trl.data.branches import Branches
from salesrl_trl.recording.writer import Batch, Entry
from salesrl_trl.reward.batch import completion_text
from salesrl_trl.reward.replay import recorded_name
from salesrl_trl.rollout.pipeline import Rollout
from salesrl_trl.types import Reward


def batch_of(rollout: Rollout, advantages: torch.Tensor | None, update: int, branches: Branches) -> Batch:
    """The values of this rank's completions, after `update` optimizer steps. `advantages`: shape (B,), of a batch that
    is trained on; read later, on another thread."""
    assert rollout.result is not None
    first = PartialState().process_index * len(rollout.inputs)  # groups may lie across ranks
    rewards, scores = rollout.result.rewards, rollout.rewards
    ids = None if rollout.sampled is None else rollout.sampled.completion_ids
    entries = [
        Entry(
            row=recorded_name(example),
            branch=branches.of(example),
            prompt=example.get("prompt"),
            text=completion_text(completion),
            tokens=None if ids is None else len(ids[place]),
            place=place,
            prompt_group=(first + place) // rollout.group,
            outcome=scored.outcome.value,
            reason=scored.reason,
            reward=scored.value,
            reference_reward=scored.reference_value,
            parts=dict(scored.components),
            functions=dict(scored.by_function),
            seconds=dict(scored.seconds),
            record=stages.completion_record,
        )
        for place, (example, completion, scored, stages) in enumerate(
            zip(rollout.inputs, rollout.completions, rewards, scores.stages, strict=True)
        )
    ]
    return Batch(
        step=update + rollout.is_trained_on,
        mode=rollout.mode,
        number=scores.number,
        staleness=update - rollout.step,
        entries=entries,
        advantages=lambda: _numbers(advantages, rewards),
        calls=rollout.result.report.calls,
    )


def _numbers(advantages: torch.Tensor | None, rewards: Sequence[Reward]) -> list[float | None]:
    if advantages is None:
        return [None] * len(rewards)
    return [
        None if reward.value is None else number for number, reward in zip(advantages.tolist(), rewards, strict=True)
    ]
