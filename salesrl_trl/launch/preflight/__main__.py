"""`python -m salesrl_trl.launch.preflight [--config RECIPE.yaml] [--stage NAME] [--json] [--SETTING VALUE ...]`.

Exit code: 0, or 2 after the first failing stage; 130 after Ctrl-C."""

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence

from salesrl_trl.ground.command_line import parser_of, strict_json
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, is_interrupt
from salesrl_trl.launch.checks.outcome import StageVerdict
from salesrl_trl.launch.preflight.stage import StageReport, finding_of, stage_text
from salesrl_trl.launch.process import end_tidily
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.settings_help import answer_help


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages and print their reports; processes other than the first only print failures, on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    answer_help(argv, own=parser_of("preflight").format_help())
    out, as_json, is_first = sys.stdout, "--json" in argv, os.environ.get("RANK", "0") == "0"
    wanted, reports = list[str](), list[StageReport]()
    examined = _reports(argv, wanted)
    with contextlib.redirect_stdout(sys.stderr):  # for output of DeepSpeed and vLLM
        for report in examined:
            reports.append(report)
            if not is_first and report.verdict is StageVerdict.FAILED:
                print(f"rank {os.environ['RANK']}: {stage_text(report)}")
            if is_first and not as_json:
                print(stage_text(report), file=out, flush=True)
    last, seconds = reports[-1], sum(report.seconds for report in reports)
    passed = last.verdict is not StageVerdict.FAILED
    step = "all stages, without `--stage`" if wanted else "start the recipe with the same settings"
    following = f"{', '.join(wanted) or 'All stages'} passed in {seconds:.1f} s. Next: {step}."
    if not passed:
        following = f"Stage {last.stage} failed after {seconds:.1f} s. Fix its findings, then run preflight again."
    if is_first and as_json:
        stages = [dataclasses.asdict(report) for report in reports]
        print(strict_json({"passed": passed, "seconds": seconds, "stages": stages, "next": following}))
    elif is_first:
        print(following)
    return 0 if passed else EXIT_BAD_INPUT


def _reports(argv: Sequence[str], wanted: list[str]) -> Iterator[StageReport]:
    """The reports of the stages. Adds the stages of the command line to `wanted`."""
    start = time.perf_counter()
    try:
        options, settings = parser_of("preflight").parse_known_args(argv)
        wanted += options.stage.split(",") if options.stage else []
        from salesrl_trl.launch.console import set_up_logging

        set_up_logging(logging.WARNING)
        for name in ("demo", "launch.preflight.scored_load"):  # the small policy may have to be built first
            logging.getLogger(f"salesrl_trl.{name}").setLevel(logging.INFO)
        from salesrl_trl.launch.plan import Plan
        from salesrl_trl.launch.preflight import runner
        from salesrl_trl.launch.settings import parse

        stages = runner.chosen(wanted, runner.STAGES)
        plan = Plan(parse(settings, FULL), in_depth=True, calls=options.calls, load=options.load)
    except Exception as error:
        if is_interrupt(error):
            raise
        seconds = time.perf_counter() - start
        yield StageReport("config", StageVerdict.FAILED, seconds, (finding_of(error),), {})
    else:
        yield from runner.examine(plan, stages, wanted)


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
