"""Records one rank's batches: its file, the run's id, the steps a resume keeps, and each batch's values. A separate
part writes the report at the end of runs that log to TensorBoard."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerState, TrainingArguments

from salesrl_trl.checkpoint.whole import STATE_FILE
from salesrl_trl.data.branches import Branches
from salesrl_trl.record.reader import as_json, rank_of, record_file, record_files
from salesrl_trl.record.replay import recorded_name
from salesrl_trl.record.report import write_report
from salesrl_trl.record.writer import Batch, Entry, Recorder
from salesrl_trl.reward.batch import completion_text, conversation_of
from salesrl_trl.rollout.in_flight import AT_ONCE
from salesrl_trl.rollout.rollout_scoring import CompletedBatch
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)


class RecorderPart(Part):
    """Passes each batch to this rank's recorder, which writes in the background. Creates one per training."""

    _recorder: Recorder | None = None

    def connect(self, run: PartContext) -> None:
        self._run = run

    def begin(self, resumed: str | None, run_id: str) -> None:
        """Open this rank's file, which stores the weights of several functions. The record continues if the checkpoint
        `resumed` is in its folder; another run's record is kept under a new name."""
        self.close()
        args, weights = self._run.args, self._run.recorded_weights
        folder, after = Path(args.output_dir), None
        if resumed is not None and Path(resumed).resolve().parent == folder.resolve():
            after = TrainerState.load_from_json(str(Path(resumed, STATE_FILE))).global_step
        gib, clean, _ = args.parsed_record()
        gone = [path for path in record_files(folder) if (rank_of(path) or 0) >= args.world_size]
        self._recorder = Recorder(
            record_file(folder, args.process_index),
            most_bytes=int(gib * 2**30),
            clean=clean,
            meta={"run": run_id, **({"weights": as_json(weights)} if len(weights) > 1 else {})},
            after=after,
            others=gone if args.local_process_index == 0 else (),
        )

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        if self._recorder is not None:
            self._recorder.record(batch_of(batch, self._run.branches))
        return {}

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    end_run = close


def batch_of(batch: CompletedBatch, branches: Branches) -> Batch:
    """The values of this rank's completions. Another thread reads the advantages later."""
    rollout, update = batch.rollout, batch.update
    assert rollout.result is not None
    first = PartialState().process_index * len(rollout.inputs)  # groups may span ranks
    rewards, scores = rollout.result.rewards, rollout.rewards
    order = AT_ONCE if rollout.groups is None or not rollout.is_in_parts else rollout.groups.order
    sampled, records = rollout.sampled, [stages.own_record for stages in scores.stages]
    ids = None if sampled is None else sampled.completion_ids
    if sampled is not None and sampled.calls:  # tool calls precede the reward's
        own = zip(records, sampled.calls, strict=True)
        records = [replace(record, calls=[*calls, *record.calls]) for record, calls in own]
    written = zip(rollout.inputs, rollout.completions, rewards, records, strict=True)
    entries = [
        Entry(
            row=recorded_name(example),
            branch=branches.of(example),
            prompt=example.get("prompt"),
            text=completion_text(completion),
            turns=conversation_of(completion),
            tokens=None if ids is None else len(ids[place]),
            place=place,
            prompt_group=(first + place) // rollout.group,
            staleness=update - rollout.steps[place],
            reward=scored,
            record=record,
        )
        for place, (example, completion, scored, record) in enumerate(written)
    ]
    return Batch(
        step=update + 1 if rollout.is_trained_on else update,
        mode=rollout.mode,
        number=scores.number,
        entries=entries,
        advantages=batch.advantages,
        calls=rollout.result.report.calls,
        order=order if rollout.is_trained_on else None,
    )


class ClosingReport(Part):
    """Writes the run's report at the end of training and after a final evaluation. Failures are logged."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if state.is_world_process_zero:
            try:
                write_report(Path(args.output_dir))
            except Exception as error:  # the policy is not saved yet
                logger.warning(
                    f"[Report] writing the report failed ({type(error).__name__}). Run `salesrl report` for the reason"
                )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if state.global_step >= state.max_steps:
            self.on_train_end(args, state)
