"""The report of a run: its figures in words, as sections for the viewer's tab and for a page alone, and as a text.

`run_figures` computes, `charts` thins, and the viewer's page draws. A figure that the run did not log has words in its
place.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from salesrl_trl import names
from salesrl_trl.ground.row_statistics import mean, pareto_front
from salesrl_trl.ground.texts import NOT_KNOWN, aligned, number
from salesrl_trl.record.view import run_figures as figures
from salesrl_trl.record.view import wording
from salesrl_trl.record.view.charts import MAX_BARS, Line, Part, bar_chart, line_chart
from salesrl_trl.record.view.page import page
from salesrl_trl.record.view.run_figures import OTHERS, POLICY, SERVICES, advice
from salesrl_trl.record.view.run_folder import QuickEval, Run, read_run
from salesrl_trl.record.view.wording import count, figure, percent, plural, seconds, shown

MAX_BRANCHES, MAX_PHASES = 3, 4  # in the text, for at most 40 lines. The page has all.
MAX_ROWS = 30  # of a table. Of more quick evaluations, those on the front, the best and the last are shown.
MAX_LISTED = 12
PATH_CHARS = 400
NOT_LOGGED = "was not logged"
NOTHING_STANDS_OUT = "Nothing stands out: every figure that is looked at is within its usual range."
STAGES_REMARK = (
    "p50, p95 and the slowest completion of each step are means over the steps; the longest is of the whole run."
)
NO_FIGURES = "No training figure was logged, so there is nothing to look at."


def paragraph(text: str, kind: str = "text") -> Part:
    """`kind` is `text`, `remark` (a small one) or `heading` (of a part of a section)."""
    return {"kind": kind, "text": text}


def table(rows: Iterable[Sequence[str]], *head: str) -> Part:
    """The first cell of a row names it."""
    return {"kind": "table", "head": head, "rows": [*rows]}


def write_report(
    folder: Path, logging_dir: Path | None = None, html: Path | None = None, text: Path | None = None,
    language: str = "en",
) -> tuple[str, Path, Path]:  # fmt: skip
    """Write the page and the text of a run's folder. Returns the text and both paths. Raises `ConfigError`."""
    html, text = html or folder / names.REPORT_PAGE_FILE, text or folder / names.REPORT_TEXT_FILE
    run = read_run(folder, logging_dir)
    plain = text_page(run)
    state = {"runs": [{"name": shown(folder.resolve().name), "path": shown(str(folder), PATH_CHARS)}], "facets": {}}
    data = {"state": state, "report": {"0": {"sections": sections(run)}}, "language": language}
    for path, content in ((text, plain), (html, page(data, plain).html)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", errors="replace")
    return plain, html, text


def sections(run: Run) -> dict[str, list[Part]]:
    """The sections of the page by language as JSON values: a title, and parts that `assets/report.js` draws."""
    english = [
        {"title": title, "parts": [*parts] or [paragraph(otherwise)]} for title, parts, otherwise in _sections(run)
    ]
    return {language: [wording.translated(section, language) for section in english] for language in wording.LANGUAGES}


def text_page(run: Run) -> str:
    """The same figures for a terminal: aligned, at most 40 lines, without control characters."""
    hidden = run.branches[MAX_BRANCHES:]
    rows = [(row.name, row.value) for row in main_figures(run) if row.branch not in hidden]
    if hidden:
        rows.append(("More branches", f"{len(hidden)}, on the page"))
    phases = sorted(figures.phases(run), key=lambda phase: -phase.share)
    largest = [f"{phase.name} {percent(phase.share)}" for phase in phases[:MAX_PHASES]]
    rows.append(("Time by phase", ", ".join(largest) or NOT_LOGGED))
    stages = [f"{stage.name} {seconds(stage.p95)}" for stage in figures.stages(run)]
    rows.append(("Stages of a reward, p95", ", ".join(stages) or "were not logged"))
    if evals := figures.shown_evals(run):
        rows.append(("Quick evaluations", f"{len(evals)}; no other beats in every branch: step {_front_steps(evals)}"))
    if notes := _notes(run):
        rows.append(("Note", "; ".join(notes)))
    sentences = advice(run) or (NOTHING_STANDS_OUT if run.steps else NO_FIGURES,)
    head = f"Training report: {shown(str(run.folder), PATH_CHARS)}"
    lines = [head, *aligned(rows, left=2), "", "What to look at", *(f"  - {sentence}" for sentence in sentences)]
    return "\n".join(lines) + "\n"


# The main figures


class MainFigure(NamedTuple):
    name: str
    value: str
    branch: str | None = None


def main_figures(run: Run) -> list[MainFigure]:
    """The main figures in words, in the order in which page and text show them."""
    rows = [*_of_training(run), *_of_machines(run)]
    rows.append(MainFigure("Best quick evaluation", _best(run) if run.quick_evals else "no quick evaluation was made"))
    for kind in dict.fromkeys(itertools.chain(*run.held_out.values())) or [names.REWARD]:  # one for each dataset
        if kind.split()[-1] == names.REWARD:
            rewards = [(step, values[kind]) for step, values in run.held_out.items() if kind in values]
            ends = [f"{number(value)} at step {step}" for step, value in (*rewards[:1], *rewards[1:][-1:])]
            held_out = f"{shown(kind)} {' → '.join(ends)}"
            rows.append(MainFigure("Held-out rows", held_out if ends else "no held-out evaluation was written"))
    if run.account.services:
        rows.append(MainFigure("Spent", _spent(run)))
    return rows + _listed_figures(run)


def _listed_figures(run: Run) -> list[MainFigure]:
    """The figures of `names.FIGURES` with a name for the report: a row for each branch, if they are by branch."""
    rows = []
    for metric in (metric for metric in names.FIGURES if metric.report):
        if metric.line in ("groups", "meter") and not run.of(metric.tag):
            continue
        if metric.line == "groups":  # counts of failures: those in the middle of a run are the ones to see
            counts = run.of(metric.tag).values()
            rows.append(MainFigure(metric.report, f"{number(mean(counts))} on average, {number(max(counts))} at most"))
        elif names.BRANCH not in metric.tag:
            rows.append(MainFigure(metric.report, _changed(run, metric.tag)))
        else:
            for branch, tag in names.of_branches(metric.tag, run.branches).items():
                rows.append(MainFigure(f"{metric.report}, {shown(branch)}", _changed(run, tag), branch))
    return rows


def _of_training(run: Run) -> Iterator[MainFigure]:
    steps = "none was logged"
    if run.steps:
        logged = f" ({len(run.steps)} logged, every {figures.interval(run)})"
        steps = f"{run.steps[-1]:,}{'' if len(run.steps) == run.steps[-1] else logged}"
    yield MainFigure("Steps done", steps)
    wall_time = NOT_KNOWN
    if run.seconds is not None:
        first, last = run.seconds
        began = datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d %H:%M UTC")
        starts = ", ".join(map(str, run.starts))
        pauses = f"; {len(run.starts)} starts (steps {starts}), with the time between them"
        wall_time = f"{seconds(last - first)} from first to last event, from {began}"
        wall_time += pauses if len(run.starts) > 1 else ""
    yield MainFigure("Wall time", wall_time)
    step_time = "step times were not logged"
    if times := run.of(names.STEP_SECONDS).values():
        step_time = f"{seconds(mean(times))} (shortest {seconds(min(times))}, longest {seconds(max(times))})"
    yield MainFigure("Mean step", step_time)
    yield MainFigure("Reward", _changed(run, names.REWARD))
    several = len(run.branches) > 1
    for branch in run.branches:
        if several or run.of(names.reference_of(branch)):  # else it is the reward above
            yield MainFigure(f"Reward, {shown(branch)}", _branch_reward(run, branch), branch)
    for branch in (branch for branch in run.branches if several or run.of(names.kl_of(branch))):
        yield MainFigure(f"KL in band, {shown(branch)}" if several else "KL in band", _branch_kl(run, branch), branch)
    yield MainFigure("Failures", _failed(run))


def _failed(run: Run) -> str:
    if not figures.failures(run) and (share := figures.failed_share(run)) is not None:
        return "none" if share <= 0 else f"{percent(share)} of the completions; not counted by reason"
    counts = []
    for source in (POLICY, SERVICES, OTHERS):
        reasons, share = figures.failures_of(run, source)
        if reasons:
            part = "" if share is None else f", {percent(share)} of the completions"
            counts.append(f"{count(sum(reasons.values()))} of {source}{part}, most often {shown(next(iter(reasons)))}")
    return "; ".join(counts) or "were not logged"


def _of_machines(run: Run) -> Iterator[MainFigure]:
    model = figures.rate(run, names.MFU_MODEL, names.time_of(names.Phase.FORWARD), names.time_of(names.Phase.BACKWARD))
    step = figures.rate(run, names.MFU_STEP)
    mfu = f"{NOT_KNOWN} (the chip's peak is not known, or it was not logged)"
    if model is not None or step is not None:
        mfu = f"{percent(model)} while the model computes, {percent(step)} of the whole step"
    yield MainFigure("MFU", mfu)
    share = figures.rate(run, names.COMPUTE_RATIO)
    at_work = "Accelerator at work" if run.of(names.GPU_PEAK) else "Model at work"
    yield MainFigure(at_work, NOT_LOGGED if share is None else f"{percent(share)} of the step")
    rates = [
        f"{rate:,.3g} {unit}/s" if rate < 1000 else f"{rate:,.0f} {unit}/s"
        for unit, tag in (("tokens", names.TOKENS_PER_SECOND), ("samples", names.SAMPLES_PER_SECOND))
        if (rate := figures.rate(run, tag)) is not None
    ]
    yield MainFigure("Throughput", ", ".join(rates) or NOT_LOGGED)
    kinds = (("GPU peak", names.GPU_PEAK), ("GPU reserved", names.GPU_RESERVED), ("host", names.HOST_MEMORY))
    peaks = [f"{kind} {max(values):.1f} GiB" for kind, tag in kinds if (values := run.of(tag).values())]
    yield MainFigure("Memory", ", ".join(peaks) or NOT_LOGGED)


def _changed(run: Run, tag: str) -> str:
    change = figures.change(run.of(tag))
    if change is None:
        return NOT_LOGGED
    if change.of == 1:
        return f"{number(change.first)} (one step)"
    ends = "step" if change.over == 1 else f"{change.over} steps"
    return f"{number(change.first)} → {number(change.last)} (means of the first and the last {ends})"


def _branch_reward(run: Run, branch: str) -> str:
    change = figures.change(run.of(names.reward_of(branch)))
    reference = mean(run.of(names.reference_of(branch)).values())
    if change is None:
        return NOT_LOGGED
    later = f" → {number(change.last)}" if change.of > 1 else ""
    return f"{number(change.first)}{later}{'' if reference is None else f'; reference {number(reference)}'}"


def _branch_kl(run: Run, branch: str) -> str:
    edges, share, series = figures.band(run, branch), figures.share_in_band(run, branch), run.of(names.kl_of(branch))
    betas = figures.change(run.of(names.beta_of(branch)))
    beta = "" if betas is None else f"; beta {figure(betas.first)} → {figure(betas.last)}"
    if not series:
        return f"no KL was logged{beta}"
    if share is None:
        return f"has no band; KL {figure(mean(series.values()))} nats per token{beta}"
    where = "" if edges is None else f" in {edges[0]:g} to {edges[1]:g} nats per token"
    return f"{percent(share)} of the steps{where}{beta}"


def _best(run: Run) -> str:
    best = figures.best_eval(figures.shown_evals(run))
    if best is None:
        return "none has a reward"
    scores = ", ".join(f"{shown(branch)} {number(score)}" for branch, score in best.scores.items())
    return f"step {best.step}: reward {number(best.reward)}{f' ({scores})' if scores else ''}"


def _spent(run: Run) -> str:
    """`1,500 calls, 0.42 USD; max_calls 1,500 of 1,500`. Killed processes may have used less than they held."""
    total = run.account.total()
    usd = f", {total.usd:,.2f} USD" if total.usd else ""
    limits = [f"{name} {run.account.taken[name]:,.6g} of {most:,.6g}" for name, most in run.account.most.items()]
    return "; ".join([f"{total.calls:,.0f} calls{usd}", *limits])


def _front_steps(evals: Sequence[QuickEval]) -> str:
    steps = [str(evals[place].step) for place in pareto_front([evaluation.scores for evaluation in evals])]
    more = " …" if len(steps) > MAX_LISTED else ""
    return f"{', '.join(steps[:MAX_LISTED])}{more}" if steps else "none has every score"


def _notes(run: Run) -> list[str]:
    infinite = f"{plural(run.infinite, 'figure')} {'was' if run.infinite == 1 else 'were'} infinite, left out"
    return [*([infinite] if run.infinite else []), *run.unread]


# The sections of the page


def _sections(run: Run) -> Iterator[tuple[str, Iterable[Part], str]]:
    """The page's sections: a title, what it shows, and the sentence of a run that has nothing to show there."""
    notes = [paragraph(f"{note[0].upper()}{note[1:]}.", "remark") for note in _notes(run)]
    yield "Main figures", [table((row.name, row.value) for row in main_figures(run)), *notes], ""
    sentences: Part = {"kind": "list", "sentences": advice(run)}
    nothing = [paragraph(NOTHING_STANDS_OUT)] if run.steps else []
    yield "What to look at", [sentences] if sentences["sentences"] else nothing, NO_FIGURES
    by_branch = " by branch" if len(run.branches) > 1 else ""
    yield f"Reward{by_branch}", _reward_part(run), "No reward was logged."
    no_kl = "No KL was logged: the run had no KL coefficient, or stopped before its first step."
    yield f"KL{by_branch}", _kl_part(run), no_kl
    yield "Step time by phase", _step_time_part(run), "Step times were not logged."
    yield "Rewards: what training waits for", _waits(run), "How long the rewards took was not logged."
    yield "Failures by reason", _failures_part(run), "Failures were not logged."
    yield "Quick evaluations", _quick_evals_part(run), "No quick evaluation was made."
    times = [(stage.name, *map(seconds, stage[1:])) for stage in figures.stages(run)]
    stages = table(times, "Stage", "p50", "p95", "Longest", "In the slowest completion")
    no_stages = "How long the stages took was not logged."
    yield "Stages of a reward", [stages, paragraph(STAGES_REMARK, "remark")] if times else [], no_stages
    if tools := [(shown(name), *map(count, counts), seconds(mean_s)) for name, counts, mean_s in figures.tools(run)]:
        head = ("Tool", "Calls in a batch", "Failed", "Errors of the policy", "Mean call")
        yield "Tools", [table(tools, *head)], ""
    alone = run.branches if len(run.branches) == 1 else ()  # whose figure is the reward
    kinds = sorted({*itertools.chain(*run.held_out.values())} - {*alone}, key=lambda n: (n != names.REWARD, n))
    rows = [(str(step), *(figure(values.get(kind)) for kind in kinds)) for step, values in run.held_out.items()]
    held_out = table(rows[:1] + rows[1:][-MAX_ROWS:], "Step", *(shown(kind).replace("_", " ") for kind in kinds))
    yield "Held-out rows", [held_out] if rows else [], "No held-out evaluation was written."
    yield "Spending", _spending_part(run), "Nothing was counted: no limit was set, and nothing has a price."


def _reward_part(run: Run) -> Iterator[Part]:
    named = [branch for branch in run.branches if run.of(names.reward_of(branch))]
    lines = [Line(branch, colour, run.of(names.reward_of(branch))) for colour, branch in enumerate(named)]
    if len(lines) != 1:
        lines.append(Line("all branches", len(named), run.of(names.REWARD)))
    lines += [
        Line(f"{branch}, reference", colour, run.of(names.reference_of(branch)), is_dashed=True)
        for colour, branch in enumerate(named)
    ]
    if any(line.series for line in lines):
        yield line_chart("mean reward", lines, starts=run.starts[1:])


def _kl_part(run: Run) -> Iterator[Part]:
    for branch in (branch for branch in run.branches if run.of(names.kl_of(branch))):
        if len(run.branches) > 1:
            yield paragraph(shown(branch), "heading")
        yield paragraph(_branch_kl(run, branch), "remark")
        kl, betas = Line("KL", 0, run.of(names.kl_of(branch))), Line("beta", 1, run.of(names.beta_of(branch)))
        yield line_chart("KL, nats per token", [kl], from_zero=True, band=figures.band(run, branch))
        if betas.series:
            yield line_chart("coefficient beta", [betas], from_zero=True)


def _step_time_part(run: Run) -> Iterator[Part]:
    if phases := figures.phases(run):
        layers = {phase.name.replace("_", " "): run.of(names.time_of(phase.name)) for phase in phases}
        yield bar_chart("seconds per step", list(run.of(names.STEP_SECONDS)), layers, grey=names.Phase.UNACCOUNTED)
        rows = [(phase.name.replace("_", " "), seconds(phase.seconds), percent(phase.share)) for phase in phases]
        yield table(rows, "Phase", "Mean per step", "Share")


def _waits(run: Run) -> Iterator[Part]:
    exposed, hidden = run.of(names.REWARD_EXPOSED), run.of(names.REWARD_HIDDEN)
    if steps := sorted({*exposed, *hidden}):
        layers = {"exposed: training waits": exposed, "hidden behind other work": hidden}
        yield bar_chart("rewards, seconds", steps, layers, grey="hidden behind other work")


def _failures_part(run: Run) -> Iterator[Part]:
    reasons, share = figures.failures(run), figures.failed_share(run)
    if not reasons:
        if share is not None:
            failed = f"{percent(share)} of the completions failed; no reason was counted."
            yield paragraph(failed if share > 0 else "Every completion was scored: there were no failures.")
        return
    steps = len(figures.bins(run.steps, MAX_BARS)[0]) * figures.interval(run)
    label = "failures per step" if steps == 1 else f"failures per {steps} steps"
    layers = {reason: run.of(names.FAILURE_REASONS + reason) for reason in reasons}
    yield bar_chart(label, run.steps, layers, are_counts=True)
    total = sum(reasons.values())
    rows = [
        (shown(reason), figures.source_of(reason), count(times), percent(times / total))
        for reason, times in reasons.items()
    ]
    yield table(rows[:MAX_ROWS], "Reason", "Of", "Times", "Share")
    if len(rows) > MAX_ROWS:
        yield paragraph(f"and {len(rows) - MAX_ROWS} more reasons", "remark")


def _quick_evals_part(run: Run) -> Iterator[Part]:
    evals = figures.shown_evals(run)
    if not evals:
        return
    yield paragraph(
        f"{plural(len(evals), 'evaluation')}, {shown(evals[-1].mode)}. On the front, which no other beats in every "
        f"branch: step {_front_steps(evals)}.",
        "remark",
    )
    branches = sorted({branch for evaluation in evals for branch in evaluation.scores})
    lines = [
        Line(branch, colour, {e.step: score for e in evals if (score := e.scores.get(branch)) is not None})
        for colour, branch in enumerate(branches)
    ]
    if any(line.series for line in lines):
        yield line_chart("score", lines)
    branches = branches if len(branches) > 1 else []  # else it has the reward
    kinds = sorted({name for evaluation in evals for name in evaluation.figures})
    front, best = pareto_front([evaluation.scores for evaluation in evals]), figures.best_eval(evals)
    rows = [
        (
            str(evaluation.step),
            number(evaluation.reward),
            *(number(evaluation.scores.get(branch)) for branch in branches),
            *(figure(evaluation.figures.get(name)) for name in kinds),
            "yes" if place in front else "",
            "yes" if evaluation is best else "",
        )
        for place, evaluation in enumerate(evals)
        if len(evals) <= MAX_ROWS or place in (*front, len(evals) - 1) or evaluation is best
    ][-MAX_ROWS:]
    yield table(rows, "Step", "Reward", *map(shown, branches), *map(shown, kinds), "On the front", "Best")
    if len(evals) > len(rows):
        yield paragraph(f"{len(evals) - len(rows)} more are not in this table.", "remark")
    if others := len(run.quick_evals) - len(evals):
        yield paragraph(f"{plural(others, 'evaluation')} made in another way: not compared with these.", "remark")


def _spending_part(run: Run) -> Iterator[Part]:
    rows = [
        (shown(name), *map(count, (spent.calls, spent.prompt_tokens, spent.completion_tokens)), f"{spent.usd:,.4f}")
        for name, spent in sorted(run.account.services.items())
    ]
    if rows:
        yield table(rows, "Service", "Calls", "Prompt tokens", "Completion tokens", "USD")
        yield paragraph(f"All together: {_spent(run)}.", "remark")
