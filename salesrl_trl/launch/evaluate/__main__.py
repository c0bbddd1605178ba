"""`python -m salesrl_trl.launch.evaluate [--config RECIPE.yaml] [--policy DIR [DIR2]] [--samples N] [...]`.

Rewards of one policy, or of two on the same held-out rows, with intervals. `--config` defaults to the settings of the
policy's run, or to recipes/full.yaml. Exit code: 0; 1 if nothing was scored; 2 for invalid input, before a model is
loaded; 3 if a service failed; 75 after SIGTERM, 130 after Ctrl-C.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from salesrl_trl.config.checks import Count, NumberOrNone, check_value
from salesrl_trl.errors import ConfigError, RunStopped, StopRequested
from salesrl_trl.ground.command_line import finite, given, parser_of
from salesrl_trl.ground.process import write_whole
from salesrl_trl.launch.process import begin_run
from salesrl_trl.launch.settings_help import answer_help

logger = logging.getLogger("salesrl_trl.launch.evaluate")  # by `python -m` too


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print, and write the file. Returns the exit code."""
    argv, out = sys.argv[1:] if argv is None else argv, sys.stdout
    answer_help(argv, own=parser_of("evaluate").format_help())
    from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_FAILED
    from salesrl_trl.launch.console import exit_with, set_log_level, set_up_logging

    set_up_logging()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # for output of other libraries
        failing_as = EXIT_BAD_INPUT
        try:
            options, settings = parser_of("evaluate").parse_known_args(argv)
            _check(options)
            from salesrl_trl.launch.evaluate import answering
            from salesrl_trl.launch.evaluate.findings import ALL, text_of
            from salesrl_trl.launch.services_plan import launched_services

            named = [answering.policy_of(name) for name in options.policy]
            recipe = answering.recipe_of(options.policy)
            if given(settings, "config") is None:
                logger.info(f"using the settings of {recipe} (override with --config RECIPE.yaml)")
            config = answering.settings_of(settings, named, recipe)
            set_log_level(config.training.log_level)
            own = config.model.model_name_or_path or "the built-in small policy"
            policies = named or [answering.EvaluatedPolicy(name=own, path=None)]
            services = stack.enter_context(launched_services(config.reward))  # they start during the checks
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="salesrl_evaluation_"))
            plans = answering.plans_of(config, policies, folder, options.rows)
            for note in dict.fromkeys(note for plan in plans for note in plan.notes):
                logger.info(note)
            failing_as = EXIT_FAILED
            findings = answering.findings_of_all(plans, policies, services, options.samples)
        except (Exception, KeyboardInterrupt) as error:
            exit_with(_reported(error), failing_as)
        print(text_of(findings), file=out, flush=True)
        if options.output is not None:
            write_whole(Path(options.output).expanduser(), json.dumps(finite(findings.as_dict()), indent=1) + "\n")
    return int(any(answered.branches[ALL].reward.value is None for answered in findings.answered))


def _reported(error: Exception | KeyboardInterrupt) -> Exception | KeyboardInterrupt:
    """The error to show. A stopped evaluation is not resumable."""
    if not isinstance(error, StopRequested):
        return error
    if str(error) == "Ctrl-C":
        return KeyboardInterrupt()
    return RunStopped(f"stopped by {error}. Nothing was saved; run the same command again.")


def _check(options: argparse.Namespace) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes != 1:
        raise ConfigError(f"an evaluation was launched with {processes} processes. Expected one, without a launcher.")
    if len(options.policy) > 2:
        raise ConfigError(f"`--policy` names {len(options.policy)} policies. Expected one, or two to compare.")
    check_value("--samples", options.samples, NumberOrNone)
    check_value("--rows", options.rows, Count | None)
    if options.output is not None and not Path(options.output).expanduser().parent.is_dir():
        raise ConfigError(f"`--output` is {options.output!r}. Expected a file in an existing folder.")


if __name__ == "__main__":
    begin_run(is_recipe=False)  # a signal stops it like Ctrl-C, and cleans up services and the folder
    sys.exit(main())
