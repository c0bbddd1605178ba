"""Starts generation, and each completion's reward as soon as it is finished."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase
from trl.data_utils import is_conversational, prepare_multimodal_messages

from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.sampler import Finished, Handle, Ready, Sampled, Sampler
from salesrl_trl.generation.turns import refusal
from salesrl_trl.names import Phase
from salesrl_trl.reward.batch import Completion, Origin
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.rollout.in_flight import KeptRollouts, Rollout
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.types import Example


class Generation(Protocol):
    """The part of `wiring.trl_generation` used for rollouts."""

    def group(self) -> int: ...
    def reward_arguments(self) -> Mapping[str, object]: ...
    def behaviour_logps(self, sampled: Sampled) -> torch.Tensor: ...
    def play(self, rows: Sequence[Example], finished: Finished, ahead: bool) -> Handle: ...
    def go_on(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class Launcher:
    sampler: Sampler
    reward_loop: RewardLoop
    timeline: Timeline
    decoder: PreTrainedTokenizerBase  # decodes completions, in the thread in which the sampler reports them
    trl: Generation
    inside_trl: bool = False  # whether TRL's scoring generates, and calls tools in whole batches
    plays: bool = False  # whether an episode is played for each row, instead of sampling a completion

    def prepare(self, inputs: Sequence[Example]) -> None:
        """Prefetch what the rewards of these rows need, before their completions arrive."""
        self.reward_loop.prepare(self._rows(inputs))

    def launch(
        self, inputs: list[Example], step: int, *, ahead: bool = False, needs_logps: bool = False,
        is_trained_on: bool = True, group: int | None = None,
    ) -> Rollout:  # fmt: skip
        """Generate, or begin to if the trainer has other work before it asks for the result (`ahead`). `step`:
        optimizer steps the weights have taken. `needs_logps`: a later policy may train on the completions. `group`:
        completions per prompt, by default the trainer's."""
        rollout = self._begun(inputs, step, is_trained_on=is_trained_on, group=group)
        if self.inside_trl:
            return rollout
        with self.timeline.phase(Phase.GENERATION):
            starts = self._starts(rollout)
            if self.plays:
                handle = self.trl.play(inputs, starts, ahead)
            else:
                handle = self.sampler.start(prompts_of(inputs), starts, ahead=ahead)
            rollout.handle = handle
            sampled = handle.result() if handle.is_ready or not ahead else None
        if sampled is not None:
            self._keep(rollout, sampled)
            if needs_logps and sampled.logprobs is None:
                rollout.behaviour_logps = self.trl.behaviour_logps(sampled)
        return rollout

    def collect(self, rollout: Rollout) -> None:
        if rollout.sampled is not None or rollout.handle is None:
            return
        with self.timeline.phase(Phase.GENERATION):
            sampled = rollout.handle.result()
        self._keep(rollout, sampled)
        if sampled.logprobs is None:
            raise ConfigError(
                "completions were generated ahead of training, but the sampler returned no log-probs. Expected "
                "log-probs, or a sampler that generates in `start`. Fix the sampler, or set `rollout_lookahead: 0`."
            )

    def restore(self, kept: KeptRollouts, inputs: list[Example], sampled: Sampled, step: int) -> Rollout:
        """A rollout from an earlier start of the run. Its rewards are computed again, from the cache."""
        rollout = self._begun(inputs, max(kept.steps, default=step))
        rollout.handle, rollout.behaviour_logps, rollout.steps = Ready(sampled), kept.behaviour_logps, kept.steps
        self._keep(rollout, sampled)
        return rollout

    def generate_inside(
        self, rollout: Rollout, prompts: Sequence[object], environments: Sequence[object] | None
    ) -> Sampled:
        rows = [{**example, "prompt": prompt} for example, prompt in zip(rollout.inputs, prompts, strict=True)]
        if environments is not None:
            rows = [{**row, "environments": own} for row, own in zip(rows, environments, strict=True)]
        with self.timeline.phase(Phase.GENERATION):
            sampled = self.sampler.start(prompts, self._starts(rollout, rows), ahead=False).result()
        self._keep(rollout, sampled, rows)
        return sampled

    def _begun(
        self, inputs: list[Example], step: int, *, is_trained_on: bool = True, group: int | None = None
    ) -> Rollout:
        group, steps = group or self.trl.group(), [step] * len(inputs)
        origin = Origin(rows=inputs, mode="train" if is_trained_on else "eval", step=step)
        rewards = self.reward_loop.begin(self._rows(inputs), group, origin)
        return Rollout(inputs=inputs, rewards=rewards, steps=steps, is_trained_on=is_trained_on, group=group)

    def _starts(self, rollout: Rollout, rows: Sequence[Example] = ()) -> Finished:
        """The callback that starts a finished completion's reward. `rows`: the batch's rows with extra columns."""
        in_messages = is_conversational({"prompt": prompts_of(rows or rollout.inputs)[0]})
        made = self._rows(rows) if rows else None

        def finished(
            place: int,
            token_ids: Sequence[int],
            messages: Sequence[Mapping[str, object]] | None = None,
            failed: str | None = None,
            columns: Mapping[str, object] | None = None,
        ) -> None:
            completion: Completion
            if messages is not None:
                completion = messages
            else:
                text = self.decoder.decode(token_ids, skip_special_tokens=True)
                completion = [{"role": "assistant", "content": text}] if in_messages else text
            row = None if made is None else made[place]
            if columns is not None:
                row = {**rollout.rewards.rows[place], **columns}
            self.reward_loop.post(rollout.rewards.start, place, completion, token_ids, row, failed)
            rollout.ended.add(place)

        return finished

    def _keep(self, rollout: Rollout, sampled: Sampled, rows: Sequence[Example] = ()) -> None:
        rollout.sampled = sampled
        extra: Mapping[str, object] = sampled.generated[5] or {}  # from a `rollout_func`
        if extra:
            rows = [
                {**row, **{name: value[place] if isinstance(value, list) else value for name, value in extra.items()}}
                for place, row in enumerate(rows or rollout.inputs)
            ]
        made = self._rows(rows) if rows else ()
        failed = sampled.failures or [refusal(sampled.own_versions(at)) for at in range(len(sampled.versions))]
        self.reward_loop.post(rollout.rewards.start_all, sampled.completions, sampled.completion_ids, made, failed)

    def _rows(self, rows: Sequence[Example]) -> list[Example]:
        """The rows with images in their prompts, and with the extra arguments of reward functions."""
        further = self.trl.reward_arguments()
        return [{**row, "prompt": prompt, **further} for row, prompt in zip(rows, prompts_of(rows), strict=True)]


def prompts_of(inputs: Sequence[Example]) -> list[object]:
    """The prompts, with images where TRL puts them: before the first user message."""
    pictures = [_pictures(example) for example in inputs]
    prompts = [example.get("prompt") for example in inputs]  # an environment may provide them
    if not any(pictures):
        return prompts
    return [prepare_multimodal_messages(prompt, own) for prompt, own in zip(prompts, pictures, strict=True)]


def _pictures(example: Example) -> list[object] | None:
    if "images" in example:
        return example["images"]  # type: ignore[no-any-return]
    return None if example.get("image") is None else [example["image"]]
