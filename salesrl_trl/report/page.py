"""The report for readers: one HTML file that needs no other file, and a text for a terminal.

Owns the order, the words around the figures, and the escaping. Counts and draws nothing. Every name from a file is
escaped: a reason code is text from outside.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from textwrap import shorten

from salesrl_trl.names import REWARD, TRACE_FILE
from salesrl_trl.report import figures
from salesrl_trl.report.advice import advice
from salesrl_trl.report.plots import Pictures
from salesrl_trl.report.records import QuickEval, Run
from salesrl_trl.report.summary import branch_rows, spent, summary
from salesrl_trl.report.words import count, figure, number, percent, plural, seconds, shown

MOST_BRANCHES = 3
"""Most branches in the text, for at most 40 lines. The page has all."""
MOST_PHASES = 4
"""Most phases in the text, for the same reason. The largest are shown."""
MOST_ROWS = 30
"""Most quick evaluations in a table. With more, those on the front, the best and the last are shown."""
NOTHING_STANDS_OUT = "Nothing stands out: every figure that is looked at is within its usual range."
NO_FIGURES = "No training figure was logged, so there is nothing to look at."
VIEWER = "https://ui.perfetto.dev"

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 58rem; padding: 2.5rem 1.5rem 4rem; color: #1f2933; background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid #cbd2d9; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { margin: .5rem 0; max-width: 44rem; }
.muted { color: #616e7c; font-size: .875rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-size: .9rem; font-variant-numeric: tabular-nums; }
table.wide { width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .32rem 1.1rem .32rem 0; border-bottom: 1px solid #e4e7eb;
  overflow-wrap: anywhere; }
thead th { color: #616e7c; font-weight: 600; }
tbody th { font-weight: 500; }
table.wide tbody th { width: 15rem; color: #52606d; }
td.n, th.n { text-align: right; }
ol { padding-left: 1.3rem; max-width: 46rem; }
li { margin: .35rem 0; }
p, li { text-wrap: pretty; }
figure { margin: .4rem 0 1.2rem; }
img { display: block; width: 100%; height: auto; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .9em; }
@media print {
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  h2, h3 { break-after: avoid; }
  figure, tr, li { break-inside: avoid; }
}
""".strip()

Cells = Sequence[str]


def html_page(run: Run, pictures: Pictures) -> str:
    """The whole page.

    Args:
        run ([`Run`]):
            The records.
        pictures ([`Pictures`]):
            Pictures of the same run.

    Returns:
        `str`: HTML without a script and without a reference to another file.
    """
    title = f"Training report: {shown(run.folder.resolve().name)}"
    sections = (
        _section("Main figures", _main_figures(run)),
        _section("What to look at", _advice(run)),
        _section("Reward by branch", _reward(run, pictures)),
        _section("KL by branch", _kl(run, pictures)),
        _section("Step time by phase", _step_time(run, pictures)),
        _section("Failures by reason", _failures(run, pictures)),
        _section("Quick evaluations", _quick_evals(run, pictures)),
        _section("Stages of a reward", _stages(run)),
        _section("Held-out rows", _held_out(run)),
        _section("Spending", _spending(run)),
        _section("What else the folder holds", _folder(run)),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<header>\n"
        f'<h1>{escape(title)}</h1>\n<p class="muted">{escape(_printable(run.folder))}</p>\n</header>\n<main>\n'
        f"{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def text_page(run: Run) -> str:
    """The same figures for a terminal: aligned, at most 40 lines, without control characters."""
    lines = [f"Training report: {_printable(run.folder)}"]
    lines += _aligned(_few_branches(run))
    lines += ["", *_text_phases(run), *_text_stages(run), *_text_rest(run)]
    sentences = advice(run) or (NOTHING_STANDS_OUT if run.steps else NO_FIGURES,)
    lines += ["", "What to look at", *(f"  - {sentence}" for sentence in sentences)]
    return "\n".join(lines) + "\n"


def _printable(path: object) -> str:
    return "".join(char if char.isprintable() else "?" for char in str(path))


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _few_branches(run: Run) -> list[tuple[str, str]]:
    """The main figures, with no more than a few branches."""
    rows = list(summary(run))
    hidden = run.branches[MOST_BRANCHES:]
    dropped = {name for name, _ in branch_rows(run, hidden)}
    more = [("More branches", f"{len(hidden)}, on the page")] if hidden else []
    return [row for row in rows if row[0] not in dropped] + more


def _text_phases(run: Run) -> list[str]:
    found = sorted(figures.phases(run), key=lambda each: -each.share)
    if not found:
        return ["Time by phase was not logged"]
    most = MOST_PHASES - bool(run.account.services)  # whose line takes the place of one
    rows = [(f"  {each.name}", f"{percent(each.share):>6}  {seconds(each.seconds)}") for each in found[:most]]
    rest = found[most:]
    if rest:
        share, spent = sum(each.share for each in rest), sum(each.seconds for each in rest)
        rows.append((f"  {len(rest)} other", f"{percent(share):>6}  {seconds(spent)}"))
    return ["Time by phase, mean per step", *_aligned(rows)]


def _text_stages(run: Run) -> list[str]:
    found = figures.stages(run)
    if not found:
        return ["Stages of a reward were not logged"]
    rows = [(f"  {each.name}", f"p50 {seconds(each.p50)}, p95 {seconds(each.p95)}, longest {seconds(each.most)}")
            for each in found]  # fmt: skip
    return ["Stages of a reward", *_aligned(rows)]


def _text_rest(run: Run) -> list[str]:
    evals = figures.shown_evals(run)
    lines = []
    if evals:
        steps = [str(evals[index].step) for index in figures.front(evals)]
        lines.append(f"Quick evaluations: {len(evals)}; no other beats in every branch: step {_listed(steps)}")
    notes = _notes(run)
    return lines + ([f"Note: {'; '.join(notes)}"] if notes else [])


def _listed(words: Sequence[str], most: int = 12) -> str:
    return f"{', '.join(words[:most])}{' …' if len(words) > most else ''}" if words else "none has every score"


def _notes(run: Run) -> list[str]:
    """Notes about the records themselves."""
    infinite = f"{plural(run.infinite, 'figure')} {'was' if run.infinite == 1 else 'were'} infinite, left out"
    return [*([infinite] if run.infinite else []), *run.unread]


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n"


def _paragraph(sentence: str) -> str:
    return f"<p>{escape(sentence)}</p>\n"


def _remark(sentence: str) -> str:
    return f'<p class="muted">{escape(sentence)}</p>\n'


def _image(picture: bytes, words: str) -> str:
    data = base64.b64encode(picture).decode("ascii")
    return f'<figure><img src="data:image/png;base64,{data}" alt="{escape(words)}"></figure>\n'


def _table(head: Cells, rows: Iterable[Cells]) -> str:
    """A table. The first column has the names of the rows, the others have numbers."""
    cells = "".join(f'<th scope="col"{_right(at)}>{escape(cell)}</th>' for at, cell in enumerate(head))
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f'<td class="n">{escape(cell)}</td>' for cell in row[1:])
        + "</tr>\n"
        for row in rows
    )
    return f"<table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def _right(column: int) -> str:
    return ' class="n"' if column else ""


def _main_figures(run: Run) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>\n' for name, value in summary(run)
    )
    notes = "".join(_remark(f"{note[0].upper()}{note[1:]}.") for note in _notes(run))
    return f'<table class="wide">\n<tbody>\n{rows}</tbody>\n</table>\n{notes}'


def _advice(run: Run) -> str:
    sentences = advice(run)
    if not sentences:
        return _paragraph(NOTHING_STANDS_OUT if run.steps else NO_FIGURES)
    items = "".join(f"<li>{escape(sentence)}</li>\n" for sentence in sentences)
    return f"<ol>\n{items}</ol>\n"


def _reward(run: Run, pictures: Pictures) -> str:
    if pictures.reward is None:
        return _paragraph("No reward was logged.")
    values = "; ".join(f"{name.removeprefix('Reward, ')} {value}" for name, value in summary(run)
                       if name.startswith("Reward"))  # fmt: skip
    return _image(pictures.reward, f"Mean reward over the steps. {values}")


def _kl(run: Run, pictures: Pictures) -> str:
    if not pictures.kl:
        return _paragraph("No KL was logged: the run had no KL coefficient, or stopped before its first step.")
    values = dict(summary(run))
    parts = []
    for branch, picture in pictures.kl.items():
        value = values[f"KL in band, {shown(branch)}"]
        parts.append(f"<h3>{escape(shown(branch))}</h3>\n{_remark(value)}")
        parts.append(_image(picture, f"KL of {shown(branch)} over the steps, with its coefficient. {value}"))
    return "".join(parts)


def _step_time(run: Run, pictures: Pictures) -> str:
    parts = []
    found = figures.phases(run)
    if pictures.step_time is None or not found:
        parts.append(_paragraph("Step times were not logged."))
    else:
        most = max(found, key=lambda each: each.share)
        words = f"Step time by phase over the steps. The largest phase is {most.name}, {percent(most.share)}"
        parts.append(_image(pictures.step_time, words))
        rows = [(each.name.replace("_", " "), seconds(each.seconds), percent(each.share)) for each in found]
        parts.append(_table(("Phase", "Mean per step", "Share"), rows))
    parts.append("<h3>Rewards: what training waits for</h3>\n")
    if pictures.reward_time is None:
        parts.append(_paragraph("How long the rewards took was not logged."))
    else:
        words = "Makespan of the rewards over the steps, the part that training waits for and the part that is hidden"
        parts.append(_image(pictures.reward_time, words))
    return "".join(parts)


def _failures(run: Run, pictures: Pictures) -> str:
    found = figures.failures(run)
    if pictures.failures is None or not found:
        share = figures.failed_share(run)
        if share is None:
            return _paragraph("Failures were not logged.")
        none = "Every completion was scored: there were no failures."
        return _paragraph(
            none if share <= 0 else f"{percent(share)} of the completions failed; no reason was counted."
        )
    total = sum(found.values())
    rows = [
        (shown(reason), figures.whose(reason), count(times), percent(times / total)) for reason, times in found.items()
    ]
    more = _remark(f"and {len(rows) - MOST_ROWS} more reasons") if len(rows) > MOST_ROWS else ""
    words = f"Failures by reason over the steps, {count(total)} in all, mostly {rows[0][0]}"
    return _image(pictures.failures, words) + _table(("Reason", "Of", "Times", "Share"), rows[:MOST_ROWS]) + more


def _quick_evals(run: Run, pictures: Pictures) -> str:
    evals = figures.shown_evals(run)
    if not evals:
        return _paragraph("No quick evaluation was made.")
    best = figures.front(evals)
    steps = [str(evals[index].step) for index in best]
    parts = [_remark(
        f"{plural(len(evals), 'evaluation')}, {shown(evals[-1].mode)}. On the front, which no other beats in "
        f"every branch: step {_listed(steps)}."
    )]  # fmt: skip
    if pictures.quick_evals is not None:
        words = f"Quick evaluations by the branches' scores. On the front: step {_listed(steps)}"
        parts.append(_image(pictures.quick_evals, words))
    parts.append(_eval_table(evals, best))
    others = len(run.quick_evals) - len(evals)
    if others:
        parts.append(_remark(f"{plural(others, 'evaluation')} made in another way: not compared with these."))
    return "".join(parts)


def _eval_table(evals: Sequence[QuickEval], best: Sequence[int]) -> str:
    branches = sorted({branch for each in evals for branch in each.scores})
    own = sorted({name for each in evals for name in each.figures})
    top = figures.best_eval(evals)
    chosen = {*best, len(evals) - 1, *(at for at, each in enumerate(evals) if each is top)}
    kept = [at for at in range(len(evals)) if len(evals) <= MOST_ROWS or at in chosen]
    head = ("Step", "Reward", *map(shown, branches), *map(shown, own), "On the front", "Best")
    rows = [
        (
            str(evals[at].step),
            number(evals[at].reward),
            *(number(evals[at].scores.get(branch)) for branch in branches),
            *(figure(evals[at].figures.get(name)) for name in own),
            "yes" if at in best else "",
            "yes" if evals[at] is top else "",
        )
        for at in kept[-MOST_ROWS:]
    ]
    left = len(evals) - len(rows)
    return _table(head, rows) + (_remark(f"{left} more are not in this table.") if left else "")


def _stages(run: Run) -> str:
    found = figures.stages(run)
    if not found:
        return _paragraph("How long the stages took was not logged.")
    rows = [
        (each.name, seconds(each.p50), seconds(each.p95), seconds(each.most), seconds(each.slowest)) for each in found
    ]
    head = ("Stage", "p50", "p95", "Longest", "In the slowest completion")
    return _table(head, rows) + _remark(
        "p50, p95 and the slowest completion of each step are means over the steps; the longest is of the whole run."
    )


def _spending(run: Run) -> str:
    services = run.account.services
    if not services:
        return _paragraph("Nothing was counted: no limit was set, and nothing has a price.")
    rows = [
        (shown(name), count(each.calls), count(each.prompt_tokens), count(each.completion_tokens), f"{each.usd:,.4f}")
        for name, each in sorted(services.items())
    ]
    table = _table(("Service", "Calls", "Prompt tokens", "Completion tokens", "USD"), rows)
    return table + _remark(f"All together: {spent(run.account)}.")


def _held_out(run: Run) -> str:
    if not run.held_out:
        return _paragraph("No held-out evaluation was written.")
    names = sorted({name for each in run.held_out for name in each.figures}, key=lambda name: (name != REWARD, name))
    rows = [(str(each.step), *(figure(each.figures.get(name)) for name in names)) for each in run.held_out]
    return _table(("Step", *(shown(name).replace("_", " ") for name in names)), rows[:1] + rows[1:][-MOST_ROWS:])


def _folder(run: Run) -> str:
    kept = shorten(", ".join(map(shown, run.kept)), 400, placeholder=" …")
    parts = [_paragraph(f"Checkpoints: {kept}." if kept else "No checkpoint is in the folder.")]
    if run.has_trace:
        parts.append(f"<p>A timeline of the steps: open <code>{TRACE_FILE}</code> at <code>{VIEWER}</code>.</p>\n")
    else:
        parts.append(_paragraph(f"No timeline ({TRACE_FILE}) was written."))
    return "".join(parts)
