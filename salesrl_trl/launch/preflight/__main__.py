"""`python -m salesrl_trl.launch.preflight [--config RECIPE.yaml] [--stage NAME] [--json] [--SETTING VALUE ...]`.

Exit code: 0, or 2 after the first stage that failed; 130 after Ctrl-C."""

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.command_line import parser_of, strict_json
from salesrl_trl.ground.shutdown import is_interrupt
from salesrl_trl.launch.checks.outcome import Finding, StageVerdict
from salesrl_trl.launch.preflight.stage import StageReport, finding_of, stage_text
from salesrl_trl.launch.process import end_tidily
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.settings_help import answer_help

FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages and print each one's report; in other processes than the first what fails, on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    answer_help(argv, own=parser_of("preflight").format_help())
    out, as_json, is_first = sys.stdout, "--json" in argv, os.environ.get("RANK", "0") == "0"
    wanted, reports = list[str](), list[StageReport]()
    try:
        options, settings = parser_of("preflight").parse_known_args(argv)
    except ConfigError as error:
        examined = iter([_failed("config", time.perf_counter(), finding_of(error))])
    else:
        wanted += options.stage.split(",") if options.stage else []
        examined = _reports(wanted, settings, options.calls, options.load)
    with contextlib.redirect_stdout(sys.stderr):  # for lines of DeepSpeed and vLLM
        for report in examined:
            reports.append(report)
            if not is_first and report.verdict is StageVerdict.FAILED:
                print(f"rank {os.environ['RANK']}: {stage_text(report)}")
            if is_first and not as_json:
                print(stage_text(report), file=out, flush=True)
    last, seconds = reports[-1], sum(report.seconds for report in reports)
    passed = last.verdict is not StageVerdict.FAILED
    following = f"{', '.join(wanted) or 'All stages'} passed in {seconds:.1f} s. Next: "
    following += "all stages, without `--stage`." if wanted else "start the recipe's script with the same settings."
    if not passed:
        following = (
            f"Stage {last.stage} failed after {seconds:.1f} s. Next: mend what it names, then start this again."
        )
    if is_first and as_json:
        stages = [dataclasses.asdict(report) for report in reports]
        print(strict_json({"passed": passed, "seconds": seconds, "stages": stages, "next": following}))
    elif is_first:
        print(following)
    return 0 if passed else FAILED


def _reports(wanted: Sequence[str], settings: Sequence[str], calls: int | None, load: int) -> Iterator[StageReport]:
    start = time.perf_counter()
    try:
        from salesrl_trl.launch.console import set_up_logging

        set_up_logging(logging.WARNING)
        for name in ("demo", "launch.preflight.scored_load"):  # the small policy may have to be made first
            logging.getLogger(f"salesrl_trl.{name}").setLevel(logging.INFO)
        from salesrl_trl.launch.plan import Plan
        from salesrl_trl.launch.preflight import runner
        from salesrl_trl.launch.settings import parse

        stages = runner.chosen(wanted, runner.STAGES)
        plan = Plan(parse(settings, FULL), in_depth=True, calls=calls, load=load)
    except Exception as error:
        if is_interrupt(error):
            raise
        yield _failed("config", start, finding_of(error))
    else:
        yield from runner.examine(plan, stages, wanted)


def _failed(stage: str, start: float, *findings: Finding) -> StageReport:
    return StageReport(stage, StageVerdict.FAILED, time.perf_counter() - start, findings, {})


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
