"""The order of the stages: `prepare` for a run, `examine` for a preflight."""

from collections.abc import Iterator, Sequence

from salesrl_trl.build.plan import Plan
from salesrl_trl.build.settings import RunConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.preflight.config import ConfigStage
from salesrl_trl.preflight.data import DataStage
from salesrl_trl.preflight.environment import EnvironmentStage
from salesrl_trl.preflight.memory import MemoryStage
from salesrl_trl.preflight.services import JudgeStage, RagStage
from salesrl_trl.preflight.stage import PreflightStage, StageReport, StageVerdict, report_of
from salesrl_trl.preflight.tokenizer import TokenizerStage
from salesrl_trl.preflight.training import EngineStage, ModelStage, StepStage

BEFORE_A_RUN: tuple[PreflightStage, ...] = (
    EnvironmentStage(), ConfigStage(), DataStage(), TokenizerStage(), MemoryStage(), RagStage(), JudgeStage(),
)  # fmt: skip
"""The stages of a run, in order of cost. None of them loads a model's weights."""
STAGES: tuple[PreflightStage, ...] = (*BEFORE_A_RUN, ModelStage(), EngineStage(), StepStage())
"""The stages of a preflight."""


def prepare(config: RunConfig) -> Plan:
    """Pass all stages of a run. Findings become notes of the plan.

    Raises:
        `SalesRLError`: the first failure.
    """
    plan = Plan(config)
    for stage in BEFORE_A_RUN:
        findings = stage.run(plan)
        findings.raise_failure()
        plan.notes += [finding.message for finding in findings.found]
    return plan


def chosen(wanted: Sequence[str], stages: Sequence[PreflightStage]) -> list[PreflightStage]:
    """All stages, or the wanted ones and those that they need, in their order.

    Raises:
        `ConfigError`: there is no such stage.
    """
    by_name = {stage.name: stage for stage in stages}
    if unknown := [name for name in wanted if name not in by_name]:
        raise ConfigError(f"`stage` is {', '.join(unknown)!r}. Expected some of: {', '.join(by_name)}. Correct it.")
    needed = list(wanted or by_name)
    for each in needed:  # grows while it is walked
        needed += [other for other in by_name[each].needs if other not in needed]
    return [stage for stage in stages if stage.name in needed]


def examine(plan: Plan, stages: Sequence[PreflightStage], wanted: Sequence[str] = ()) -> Iterator[StageReport]:
    """Run the stages of `chosen` in their order. The first failure ends it, and what they opened is closed.

    Yields:
        `StageReport`: when a stage has ended. With `wanted`, only of these stages and of one that failed.
    """
    with plan.opened:
        for stage in stages:
            report = report_of(stage, plan)
            if not wanted or stage.name in wanted or report.verdict is StageVerdict.FAILED:
                yield report
            if report.verdict is StageVerdict.FAILED:
                return
