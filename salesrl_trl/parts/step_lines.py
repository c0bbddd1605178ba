"""Console lines, two per step, and epoch totals, from the trainer's log."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from transformers import TrainerState

from salesrl_trl import names
from salesrl_trl.ground.texts import calls_and_usd, number
from salesrl_trl.names import Phase
from salesrl_trl.parts.lookahead import WAITS
from salesrl_trl.types import Outcome
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)

Logs = Mapping[str, float | None]  # a step's metrics as logged by the trainer; `None` for a branch without rows
SHOWN_SHARE = 0.01  # phases with a smaller share of the step's time are omitted


class StepLine(Part):
    """Logs two lines per step: `step_line` with the run's progress, and `judge_line` if a judge scores."""

    def connect(self, run: PartContext) -> None:
        self._branches, self._names, self._ledger = run.args.branches, run.reward_loop.reward.names, run.ledger
        self._processes = run.args.world_size
        self._full = set[str]()  # services reported as the bottleneck

    def on_train_begin(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        self._started = self._last = time.perf_counter()
        self._last_step = state.global_step
        self._after_first: tuple[float, int] | None = None

    def on_log(self, _: object, state: TrainerState, *__: object, logs: Logs | None = None, **___: object) -> None:
        if not state.is_world_process_zero or logs is None or "reward" not in logs:
            return
        now = time.perf_counter()
        step, elapsed = state.global_step, now - self._started
        seconds = (now - self._last) / max(step - self._last_step, 1)
        # The first line's steps also evaluate, compile and open connections, so later ones are faster. The average
        # excludes them as soon as there are others.
        if self._after_first is None:
            average = seconds - (logs.get(names.time_of(Phase.EVALUATION)) or 0.0)
            self._after_first = (now, step)
        else:
            average = (now - self._after_first[0]) / max(step - self._after_first[1], 1)
        failures, are_actions = self._ledger.failures("train"), self._names.has_actions
        line = step_line(step, state.max_steps, logs, self._branches, failures, seconds, are_actions)
        progress = f"avg {average:.1f} s, elapsed {clock(elapsed)}, ETA {clock(average * (state.max_steps - step))}"
        calls = logs.get(names.BUDGET_CALLS)  # absent without a limit and a price
        spent = "" if calls is None else f"spent {calls_and_usd(calls, logs.get(names.BUDGET_USD) or 0.0)}"
        logger.info(" | ".join(part for part in (line, spent, progress, shares(logs)) if part))
        if self._names.providers:
            logger.info(judge_line(step, logs, self._names.providers, self._ledger.batches("train")))
        self._report_full(logs, seconds, self._ledger.batches("train") / max(step - self._last_step, 1))
        self._last, self._last_step = now, step

    def _report_full(self, logs: Logs, seconds: float, batches: float) -> None:
        """Logs once if a service's concurrency limit determines a step's `seconds`. `batches`: per step."""
        waited = logs.get(names.REWARD_EXPOSED) or 0.0
        for service in self._names.services:
            full_ms = (logs.get(names.traffic_of(service, "full_ms")) or 0.0) * batches / self._processes
            if service not in self._full and waited > WAITS * seconds and full_ms > 500 * seconds:
                self._full.add(service)
                logger.info(
                    f"[Limit] {service}: calls queued at its highest concurrency limit for {full_ms / 1000:.1f} of "
                    f"{seconds:.1f} s, and the step waited {waited:.1f} s for rewards. A lookahead doesn't help. If "
                    "the service can serve more calls, raise its limit (judge_max_concurrency, rag.max_concurrency)"
                )


def step_line(
    step: int, max_steps: int, logs: Logs, branches: Sequence[str], failures: Mapping[str, int], seconds: float,
    are_actions: bool = True,
) -> str:  # fmt: skip
    """`[Step 3/60] reward fairness=0.50 | loss 0.012, KL 0.03 | valid actions 88% | failures not_json=8 | 1.2 s,
    waited 0.26 s for rewards`."""
    invalid = logs.get(names.outcome_of(Outcome.INVALID_ACTION))
    unscored = [logs.get(names.outcome_of(outcome)) for outcome in (Outcome.JUDGE_INVALID, Outcome.INFRA)]
    shares_of_bad = [share for share in ([invalid] if are_actions else unscored) if share is not None]
    well = 1 - sum(shares_of_bad)
    ended_well = "n/a" if not shares_of_bad else ">99%" if 0.99 < well < 1 else f"{well:.0%}"  # 100 % is all
    if invalid and not are_actions:
        ended_well += f", {invalid:.1%} of all as invalid"
    terms = ((word, logs.get(word.lower())) for word in ("loss", "KL"))
    update = ", ".join(f"{word} {value:.2g}" for word, value in terms if value is not None)
    shown = []
    for what, tag in ((listed.console, listed.tag) for listed in names.FIGURES if listed.console):
        tags = names.of_branches(tag, branches) if names.BRANCH in tag else {"": tag}
        values = (f"{branch}={number(logs.get(name), '.2f')}" for branch, name in tags.items())
        shown.append(f"{what} {' '.join(values) if len(tags) > 1 else number(logs.get(*tags.values()), '.2f')}")
    parts = (
        *shown,
        *([update] if update else []),
        f"{'valid actions' if are_actions else 'scored'} {ended_well}",
        f"failures {' '.join(f'{reason}={count}' for reason, count in sorted(failures.items())) or 'none'}",
        *(["every group has equal rewards: nothing to learn from"] if logs.get("frac_reward_zero_std") == 1 else []),
        f"{seconds:.1f} s, waited {number(logs.get(names.REWARD_EXPOSED), '.2f')} s for rewards",
    )
    return f"[Step {step}/{max_steps}] {' | '.join(parts)}"


def shares(logs: Logs) -> str:
    """`reward_wait 78%, generation 14%, backward 5%`: shares of the step's wall time, largest first. Empty if not
    measured."""
    wall = logs.get(names.STEP_SECONDS)
    if not wall:
        return ""
    parts = sorted(((logs.get(names.time_of(phase)) or 0.0) / wall, phase) for phase in Phase)
    return ", ".join(f"{phase} {share:.0%}" for share, phase in reversed(parts) if share >= SHOWN_SHARE)


def clock(seconds: float) -> str:
    """Minutes and seconds as `1:31`, or with hours as `2:01:31`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def judge_line(step: int, logs: Logs, providers: Sequence[str], batches: int = 1) -> str:
    """`[Judge@step5] time=3.2s providers={'openai': 8}`: seconds from the first verdict request to the last verdict,
    and each provider's verdicts since the last line. `logs` holds means over `batches`. If groups are judged jointly,
    each call counts as one verdict."""
    counts = {name: round((logs.get(names.usage_of(name, "verdicts")) or 0) * batches) for name in providers}
    return f"[Judge@step{step}] time={logs.get(names.JUDGE_SECONDS) or 0:.1f}s providers={counts}"


TOKENS = "num_tokens"  # TRL's tag: prompt and completion tokens so far
RATIOS = (names.DATA_LOADING_RATIO, names.COMPUTE_RATIO, names.MFU_STEP)  # shares of a step's wall time


class EpochTotals(Part):
    """Logs epoch totals for trackers: steps, means of the console's metrics, tokens, seconds by phase, shares of wall
    time, peak memory, and failures by reason. Steps after an epoch's last log line count towards the next one. Every
    rank logs the same names each epoch; failures by reason are a separate entry, because new reasons may appear."""

    def connect(self, run: PartContext) -> None:
        self._branches, self._ledger, self._log = run.args.branches, run.ledger, run.trl.log

    def on_train_begin(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        self._last_step, self._tokens = state.global_step, float(state.num_input_tokens_seen)
        self._start_over()

    def _start_over(self) -> None:
        self._first_step, self._first_tokens = self._last_step, self._tokens
        self._seconds = dict.fromkeys((*map(names.time_of, Phase), names.STEP_SECONDS), 0.0)
        self._most = dict[str, float | None].fromkeys(names.MEMORY)
        self._sums = dict.fromkeys(RATIOS, (0.0, 0.0))  # sum over steps, and steps; ratios are weighted by seconds
        for tag in (listed.tag for listed in names.FIGURES if listed.console):
            tags = names.of_branches(tag, self._branches).values() if names.BRANCH in tag else [tag]
            self._sums |= dict.fromkeys(tags, (0.0, 0.0))
        self._counts = Counter[str]()

    def on_log(self, _: object, state: TrainerState, *__: object, logs: Logs | None = None, **___: object) -> None:
        if logs is None or "reward" not in logs:
            return
        steps = state.global_step - self._last_step
        for name in self._seconds:
            self._seconds[name] += (logs.get(name) or 0.0) * steps
        for name, (total, count) in self._sums.items():
            value, weight = logs.get(name), steps * ((logs.get(names.STEP_SECONDS) or 0.0) if name in RATIOS else 1.0)
            if value is not None:
                self._sums[name] = (total + value * weight, count + weight)
        for name, most in self._most.items():
            self._most[name] = max((each for each in (most, logs.get(name)) if each is not None), default=None)
        self._counts.update(self._ledger.failures("train"))
        self._last_step, self._tokens = state.global_step, logs.get(TOKENS) or self._tokens

    def on_epoch_end(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        if self._last_step > self._first_step:
            totals = {
                "steps": float(self._last_step - self._first_step),
                "tokens": self._tokens - self._first_tokens,
                "failures": float(self._counts.total()),
                **{name: total / count if count else None for name, (total, count) in self._sums.items()},
                **self._seconds,
                **self._most,
            }
            self._log({f"{names.EPOCH_TOTALS}{name}": value for name, value in totals.items()})
            if self._counts:
                start = f"{names.EPOCH_TOTALS}{names.FAILURE_REASONS}"
                self._log({f"{start}{reason}": float(count) for reason, count in self._counts.items()})
        self._start_over()
