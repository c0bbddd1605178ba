"""The stage `data`: the rows, and the lengths of their prompts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import is_torchvision_available

from salesrl_trl.build.plan import Plan
from salesrl_trl.checkpoint.identity import check_identity, identity_of, rows_of
from salesrl_trl.errors import ConfigError
from salesrl_trl.preflight.stage import Findings
from salesrl_trl.types import SalesRow

SHOWN_ROWS = 5


class DataStage:
    """Columns, branches, lengths, and enough rows. A checkpoint's rows have to be these rows."""

    name = "data"
    needs: tuple[str, ...] = ("config",)

    def run(self, plan: Plan) -> Findings:
        _check_pictures(plan)
        findings, train, held_out = Findings(), plan.train, plan.held_out
        for part in (plan.train_records, plan.held_out_records, train, held_out):
            if part is not None and part.note:
                findings.note(part.note)
        _check_resume(plan)
        _check_quick_evaluation(plan)
        _check_branches(plan, findings)
        _check_repeats(train.rows, held_out.rows, findings)
        findings.figures |= {
            "train_rows": len(train.rows),
            "held_out_rows": len(held_out.rows),
            "rows_with_pictures": sum(bool(row.images) for row in (*train.rows, *held_out.rows)),
            "longest_prompt_tokens": max(train.longest, held_out.longest),
            "limit_tokens": None if plan.limit is None else plan.limit.tokens,
        }
        return findings


def _check_pictures(plan: Plan) -> None:
    """Raise unless the policy reads pictures, if rows have some, and the engine does."""
    with_pictures = [row for row in (*plan.train_rows, *plan.held_out_rows) if row.images]
    training, named = plan.config.training, plan.config.model.model_name_or_path
    if with_pictures and plan.processor is None:
        raise ConfigError(
            f"{len(with_pictures):,} rows have pictures ({_named(with_pictures)}), and the policy "
            f"{named or '(the packaged small policy)'} reads text alone. Expected one that reads both, such as a "
            "Qwen2.5-VL. Name one in `model_name_or_path`, or leave the pictures out: "
            "`columns: {images: {value: null}}`."
        )
    colocated = training.use_vllm and training.vllm_mode == "colocate"
    if plan.processor is not None and colocated and not is_torchvision_available():
        raise ConfigError(
            "the policy reads pictures, and vLLM loads such models with torchvision, which is not installed. Expected "
            f"the build that belongs to torch {torch.__version__} (a GPU's installation has it). Install it, or set "
            "`use_vllm: false`: transformers generates then, more slowly."
        )


def _check_branches(plan: Plan, findings: Findings) -> None:
    rows = Counter(row.branch for row in plan.train.rows)
    findings.figures |= {f"rows_{branch}": rows[branch] for branch in plan.config.training.branches}
    if without := [branch for branch in plan.config.training.branches if not rows[branch]]:
        remedy = "Add rows, or leave the branch out of `branches`."
        findings.note(f"No training row belongs to {', '.join(without)}.", remedy)


def _check_repeats(train: Sequence[SalesRow], held_out: Sequence[SalesRow], findings: Findings) -> None:
    """Look for conversations that come twice in training, and for held-out ones that are trained on."""
    seen, repeats = set[object](), list[SalesRow]()
    for row in train:
        key = (row.branch, row.conversation, row.documents, row.images)
        if key in seen:
            repeats.append(row)
        seen.add(key)
    if repeats:
        findings.note(
            f"{len(repeats):,} of {len(train):,} training rows repeat an earlier one: {_named(repeats)}.",
            "Leave them out, unless they are to count more.",
        )
    trained = {(row.conversation, row.images) for row in train}
    known = [row for row in held_out if (row.conversation, row.images) in trained]
    if known:
        findings.note(
            f"{len(known):,} of {len(held_out):,} held-out rows have a conversation of the training rows, so the "
            f"evaluation does not show what is learned: {_named(known)}.",
            "Hold out other conversations.",
        )


def _named(rows: Sequence[SalesRow]) -> str:
    more = f" and {len(rows) - SHOWN_ROWS:,} more" if len(rows) > SHOWN_ROWS else ""
    return ", ".join(row.row_id for row in rows[:SHOWN_ROWS]) + more


def _check_resume(plan: Plan) -> None:
    training = plan.config.training
    if training.resume_from_checkpoint is not None:  # the trainer logs differences that are allowed
        made_of = identity_of(training, rows_of(plan.train.prompts, (row.branch for row in plan.train.rows)))
        check_identity(Path(training.resume_from_checkpoint), made_of, training.allow_changed_resume)


def _check_quick_evaluation(plan: Plan) -> None:
    rows, processes = len(plan.held_out.rows), plan.config.training.world_size
    if plan.config.telemetry.quick_eval_steps and rows < processes:
        raise ConfigError(
            f"a quick evaluation has {rows} held-out rows for {processes} processes. Expected one for each. Hold out "
            "more (`max_eval_rows`), or set `quick_eval_steps: 0`."
        )
