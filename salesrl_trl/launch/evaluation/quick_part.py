"""Quick evaluations in a run. `evaluation.quick` owns when they are due and what they do, `rollout.greedy` answers."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from salesrl_trl.launch.evaluation.greedy import GreedySubject, ScoredBatch
from salesrl_trl.launch.evaluation.quick import QuickEvaluator, sample
from salesrl_trl.launch.evaluation.subject import Processes
from salesrl_trl.types import Example
from salesrl_trl.wiring.part import Part, PartContext


class QuickEvalPart(Part):
    def connect(self, run: PartContext) -> None:
        self._run = run
        args, trl, settings, ranks = run.args, run.trl, run.quick_eval, Processes()
        assert settings is not None
        others = (figure for part in run.parts for figure in part.quick_figures if figure not in settings.figures)
        settings = replace(settings, figures=(*others, *settings.figures))
        control = run.run_control
        self.evaluator = QuickEvaluator(
            _subject(run), sample(trl.eval_dataset, settings.rows, run.branches, ranks), branches=args.branches,
            settings=settings, output_dir=Path(args.output_dir), least_scored=args.min_valid_reward_fraction,
            ranks=ranks, timeline=run.instruments.timeline, is_cut=lambda: control.is_spent,
        )  # fmt: skip
        run.figures.words["figure"] = self.evaluator.figure_names

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluator.run_begins(self._run.trl.step())

    def after_step(self, step: int) -> None:
        self.evaluator.evaluate_if_due(step)


def _subject(run: PartContext) -> GreedySubject:
    args, trl, kl = run.args, run.trl, run.kl

    @contextlib.contextmanager
    def set_aside() -> Iterator[None]:
        with trl.set_aside(), run.sampler.greedily(), run.ledger.aside("eval"):
            yield

    def score(batches: Sequence[list[Example]]) -> Iterator[ScoredBatch]:
        for rows in run.pipeline.evaluations(batches, trl.step()):
            rollout, output = run.scoring.evaluate(rows, trl.step())
            assert rollout.sampled is not None and rollout.result is not None
            ids, rewards = rollout.sampled.completion_ids, rollout.result.rewards
            yield ScoredBatch(output=output, completion_ids=ids, rewards=rewards)

    return GreedySubject(
        set_aside=set_aside,
        score=score,
        logps_of=trl.logps_of,
        decode=lambda ids: trl.tokenizer.batch_decode(ids, skip_special_tokens=True),
        branch_of=run.branches.of,
        ends=frozenset({*trl.eos_token_ids, trl.tokenizer.pad_token_id}),
        batch_size=args.per_device_eval_batch_size,
        kl=args.kl_penalty(),
        betas=lambda: {} if kl is None else dict(zip(args.branches, kl.control.betas, strict=True)),
        save=trl.save,
        log=trl.log,
    )
