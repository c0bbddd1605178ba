"""A whole run: settings, checks, reward services, trainer, training, last evaluation. Recipes call `main`.

Owns this order and nothing else. Wrong settings, data, addresses or model paths stop a run before a model is loaded,
with one message and exit code 2.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import PartialState

from salesrl_trl.errors import SalesRLError
from salesrl_trl.names import LOG_FILE, Phase, StartUp
from salesrl_trl.process import collect_seldom, keep_freed_memory
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.readiness import warm_up
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.run.assembly import open_reward
from salesrl_trl.run.building import build_instruments, build_trainer
from salesrl_trl.run.checks.folders import check_output_dir
from salesrl_trl.run.console import EXIT_BAD_INPUT, EXIT_STOPPED, exit_with, keep_console, set_up_logging
from salesrl_trl.run.preflight import Prepared, prepare
from salesrl_trl.run.settings import RunConfig, parse
from salesrl_trl.telemetry.instruments import Instruments

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer


def main(default_recipe: Path, argv: Sequence[str] | None = None) -> None:
    """Run a recipe and exit.

    Args:
        default_recipe (`Path`):
            The recipe's YAML file, for a command line without `--config`.
        argv (`Sequence[str]`, *optional*):
            Command-line arguments. Defaults to those of the process.
    """
    set_up_logging()
    try:
        config = parse(sys.argv[1:] if argv is None else argv, default_recipe)
        check_output_dir(config.training.output_dir)
        if config.training.process_index == config.training.local_process_index:  # the processes of the first node
            keep_console(Path(config.training.output_dir) / LOG_FILE)
        prepared = prepare(config)
    except SalesRLError as error:
        exit_with(error, EXIT_BAD_INPUT)
    try:
        with open_reward(config.reward, config.training, prepared.rows, prepared.reward) as reward:
            run(config, prepared, reward)
    except SalesRLError as error:
        exit_with(error, EXIT_STOPPED)


def run(config: RunConfig, prepared: Prepared, reward: SalesReward | RemoteReward) -> None:
    """Load, train, evaluate before and after, save."""
    if config.training.device.type == "cpu":
        keep_freed_memory()
    instruments = build_instruments(config)
    try:
        instruments.start(PartialState().is_main_process)
        trainer = build_trainer(config, prepared, reward, instruments)
        try:
            _train(config, trainer, instruments)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                trainer.finish()
            raise
        trainer.finish()
    finally:
        instruments.close()


def _train(config: RunConfig, trainer: "SalesGRPOTrainer", instruments: Instruments) -> None:
    collect_seldom()
    if config.reward.warm_up_services:
        with instruments.timeline.phase(StartUp.WARM_UP):
            warm_up(trainer.rooms.desk)
    with _stops_on_sigterm(trainer):
        trainer.train(resume_from_checkpoint=config.training.resume_from_checkpoint)
    with instruments.timeline.phase(Phase.CHECKPOINT):
        trainer.save_model(config.training.output_dir)
    trainer.rooms.stopping.raise_if_asked()  # before the evaluation: without services it would score nothing
    if config.training.held_out_eval:
        trainer.evaluate()


@contextlib.contextmanager
def _stops_on_sigterm(trainer: "SalesGRPOTrainer") -> Iterator[None]:
    """On SIGTERM, for example from a scheduler, the run ends with a checkpoint."""
    before = signal.signal(signal.SIGTERM, lambda *_: trainer.request_stop("SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
