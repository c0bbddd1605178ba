"""A complete run: settings, checks, reward services, trainer, training, final evaluation. Recipes call `main`.

Invalid settings, data or services stop a run before a model is loaded, with exit code 2.
"""

import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from salesrl_trl.launch.kept import collect_seldom, keep_freed_memory, remember_packages
from salesrl_trl.launch.process import begin_run

if __name__ == "__main__":
    begin_run()  # before the imports that take seconds

# First: torch, TRL and vLLM create a million permanent objects. This saves 1.4 of 7.3 s of CPU at their import
collect_seldom()
remember_packages()

from accelerate import PartialState
from torch import distributed

from salesrl_trl.checkpoint.run_files import put_run_aside
from salesrl_trl.demo.services.launcher import EmbeddedServices
from salesrl_trl.errors import RunStopped, ServiceTimeout, ServiceUnavailable
from salesrl_trl.ground.command_line import given
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_RESUMABLE
from salesrl_trl.launch import signals
from salesrl_trl.launch.assembly import open_reward
from salesrl_trl.launch.banner import closing_lines
from salesrl_trl.launch.checks.folders import check_output_dir, claim_output_dir
from salesrl_trl.launch.console import exit_with, keep_console, set_log_level, set_up_logging
from salesrl_trl.launch.evaluation.held_out import HeldOut
from salesrl_trl.launch.plan import Plan, build_instruments, build_trainer, take_policy
from salesrl_trl.launch.preflight.runner import prepare
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.run_record import has_finished, write_finished, write_record
from salesrl_trl.launch.services_plan import launched_services
from salesrl_trl.launch.settings import RunConfig, parse
from salesrl_trl.names import LOG_FILE, Phase, StartUp
from salesrl_trl.reward.reward_loop import RewardLoop, warm_up
from salesrl_trl.telemetry.instruments import Instruments, imports_so_far
from salesrl_trl.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer

logger = logging.getLogger("salesrl_trl.launch.train")  # by `python -m` too
MADE_UP_STEPS = 5  # of `mode: rewards`


def main(default_recipe: Path, argv: Sequence[str] | None = None) -> None:
    """Run a recipe and exit. `default_recipe`: the YAML file without `--config`."""
    set_up_logging()
    signals.catch()
    argv = sys.argv[1:] if argv is None else argv
    start = Timeline()  # by the host's clock: the device is not used before the checks have passed
    start.add([imports_so_far()])
    resumes = False
    with contextlib.ExitStack() as stack:
        try:
            with start.phase(StartUp.CHECKS):
                config = parse(argv, default_recipe)
                set_log_level(config.training.log_level)
                _limit_waits(config)
                if config.training.mode == "rewards":
                    raise SystemExit(_score_made_up(config, default_recipe, argv))
                check_output_dir(config.training.output_dir)
                if config.training.process_index == 0:
                    stack.enter_context(claim_output_dir(config.training.output_dir))
                if config.training.process_index == config.training.local_process_index:  # of the first node
                    keep_console(Path(config.training.output_dir) / LOG_FILE)
                services = stack.enter_context(launched_services(config.reward))  # they start during the checks
                training = config.training
                resumes = str(config.training.resume_from_checkpoint).lower() not in ("none", "false")
                plan = prepare(config)
                if resumes and has_finished(training):
                    logger.info("this run has finished. Raise `max_steps` or `num_train_epochs` to continue it.")
                    return
                if config.training.process_index == 0:
                    replay = config.reward.parsed_replay()
                    used = [config.policy_path, None if replay is None else replay.record]
                    put_run_aside(Path(training.output_dir), training.resume_from_checkpoint, used)
                    command, processes = [sys.argv[0], *argv], config.training.world_size
                    write_record(Path(config.training.output_dir), config.recipe, command, processes)
        except (Exception, KeyboardInterrupt) as error:
            is_outage = isinstance(error, (ServiceUnavailable, ServiceTimeout))
            exit_with(error, EXIT_RESUMABLE if resumes and is_outage else EXIT_BAD_INPUT)
        try:
            run(plan, services, start)
        except (Exception, KeyboardInterrupt) as error:
            exit_with(error, EXIT_FAILED)  # or 75 if the run is resumable


def _limit_waits(config: RunConfig) -> None:
    """On CPUs, transformers doesn't pass `ddp_timeout` to the process group, whose default is 30 minutes."""
    if config.training.device.type == "cpu" and distributed.is_initialized():
        distributed.distributed_c10d._set_pg_timeout(config.training.ddp_timeout_delta)


def _score_made_up(config: RunConfig, default_recipe: Path, argv: Sequence[str]) -> int:
    """Score a step's number of made-up completions, for 5 steps or `max_steps`. Returns the exit code."""
    from salesrl_trl.launch.preflight.__main__ import main as preflight  # a command, imported only here

    steps = min(config.training.max_steps, MADE_UP_STEPS) if config.training.max_steps > 0 else MADE_UP_STEPS
    recipe = ["--config", str(default_recipe)] if given(argv, "config") is None else []
    return preflight([*recipe, *argv, "--stage", "judge", "--calls", "0", "--load", str(steps)])


def run(plan: Plan, services: EmbeddedServices, start: Timeline) -> None:
    """Load, train, evaluate, save. The embedded `services` start while the policy loads, and the warm-up calls run
    while vLLM starts. `start`: the phases so far."""
    config = plan.config
    # A resumed run warmed them up at its first start; an outage is handled in training.
    asks_first = config.reward.warm_up_services and config.training.resume_from_checkpoint is None
    if config.training.device.type == "cpu":
        keep_freed_memory()
    with contextlib.ExitStack() as end:
        with contextlib.ExitStack() as stack:
            instruments = stack.enter_context(contextlib.closing(build_instruments(config)))
            instruments.start(PartialState().is_main_process)
            take_policy(plan, instruments)
            with instruments.timeline.phase(StartUp.SERVICES):
                records = bool(config.training.record)
                opened = open_reward(config.reward, config.training, plan.rows, plan.reward, services, records=records)
                reward_loop = RewardLoop(stack.enter_context(opened))
            if asks_first:
                reward_loop.begin_warm_up(instruments.timeline)
            trainer = build_trainer(plan, reward_loop, instruments)
            start.close()
            instruments.timeline.add(start.drain_spans())
            try:
                _train(config, trainer, instruments, asks_first)
            except BaseException as error:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    trainer.finish()
                if error is trainer.components.stopping.survived:
                    raise RunStopped(error.__notes__[-1]) from error
                raise
            end.enter_context(
                signals.handed_to(lambda name: logger.info(f"{name}: the run is complete and about to exit."))
            )
            trainer.finish()
        _note_end(plan, trainer.state.global_step)


def _note_end(plan: Plan, step: int) -> None:
    training = plan.config.training
    if not PartialState().is_main_process:
        return
    try:
        write_finished(training, step)
    except OSError as error:  # everything else is done
        logger.warning(f"can't record that this run has finished ({type(error).__name__})")
    for line in closing_lines(training.output_dir, saves_policy=training.mode != "rollouts", notes=plan.notes):
        logger.info(line)


def _train(config: RunConfig, trainer: "SalesGRPOTrainer", instruments: Instruments, asks_first: bool) -> None:
    collect_seldom()
    if asks_first:
        with instruments.timeline.phase(StartUp.WARM_UP):
            warm_up(trainer.components.reward_loop, [part.warm_up for part in trainer.components.parts])
    stopping = trainer.components.stopping
    with signals.handed_to(trainer.request_stop):
        trainer.train(resume_from_checkpoint=config.training.resume_from_checkpoint)
        with stopping.ending():
            if config.training.mode != "rollouts":
                with stopping.held(), instruments.timeline.phase(Phase.CHECKPOINT):
                    trainer.save_model(config.training.output_dir, _internal_call=True)  # pushed at the end
            stopping.raise_if_asked()  # before the evaluation, which scores nothing without services
            held_out = next(part for part in trainer.components.parts if isinstance(part, HeldOut))
            is_done = held_out.done_at == trainer.state.global_step  # by `eval_strategy`
            is_done = is_done and not config.training.load_best_model_at_end  # else by other weights
            if config.training.mode != "rollouts" and config.training.held_out_eval and not is_done:
                trainer.evaluate()
                stopping.raise_if_asked()
            if config.training.mode != "rollouts":
                if config.training.push_to_hub:
                    trainer.push_to_hub(commit_message="Model save")
                trainer.create_model_card()  # with the final evaluation


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.argv[0] = "python -m salesrl_trl.launch.train"  # for the usage and the run's record
    main(FULL, ["--config", *arguments] if arguments and not arguments[0].startswith("-") else arguments)
