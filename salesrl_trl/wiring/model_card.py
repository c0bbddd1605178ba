"""The model card of a run, in place of TRL's: what was trained, by which rewards, and what came of it.

Owns its contents: no text of a row, no address, no key and no path. `model_card.jinja` has the words.
"""

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import ModelCardData
from transformers import TrainerState

from salesrl_trl import __version__
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.keys import is_secret
from salesrl_trl.evaluation.held_out import HeldOut, change_in_words
from salesrl_trl.ground.process import installed, write_whole
from salesrl_trl.ground.tables import NOT_KNOWN, filled, number
from salesrl_trl.names import MODEL_CARD_FILE, SAVING_FOLDER
from salesrl_trl.reward.scorer import RewardNames
from salesrl_trl.telemetry.step_lines import calls_and_usd
from salesrl_trl.update.spending import Spending
from salesrl_trl.wiring.banner_lines import training_lines

PACKAGES = ("trl", "transformers", "torch", "peft", "vllm")
_PLAIN = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?|[A-Za-z_]\w*")
_PLACE = re.compile("url|host|address|server|path|dir|file|folder|id|name|dataset|text|prompt", re.IGNORECASE)


class Trained(NamedTuple):
    """What a card needs of a trainer."""

    args: SalesGRPOConfig
    state: TrainerState
    rewards: Mapping[str, float]  # weight of each reward function
    names: RewardNames
    held_out: HeldOut
    spending: Spending
    base: str  # the policy's folder or name
    is_adapter: bool
    reads_pictures: bool


def write_card(
    folder: Path, run: Trained, name: str | None = None, dataset: str | None = None, tags: Sequence[str] = ()
) -> None:
    """Write the card of a run into a folder. `name`, `dataset` and `tags` are of the user's choice."""
    args, base, total = run.args, hub_name(run.base), run.spending.account().total()
    logged = {tag: value for entry in run.state.log_history for tag, value in entry.items()}  # the last of each
    if name in (None, SAVING_FOLDER):  # the latter is TRL's, of a checkpoint that is being written
        name = (args.hub_model_id or str(run.held_out.output_dir.resolve())).rpartition("/")[2]
    metadata = ModelCardData(
        base_model=base if base == run.base else None,
        datasets=dataset if dataset and dataset == hub_name(dataset) else None,
        library_name="peft" if run.is_adapter else "transformers",
        model_name=name,
        pipeline_tag="image-text-to-text" if run.reads_pictures else "text-generation",
        tags=sorted({"generated_from_trainer", "trl", "grpo", "salesrl_trl", *tags}),
    )
    services = {service: re.fullmatch(r"model (.+) at \S+", place) for service, place in run.names.places.items()}
    text = filled(
        Path(__file__).with_name("model_card.jinja"), run=run, name=name, base=base, metadata=metadata.to_yaml(),
        version=__version__, branches=args.branches, step=dict(training_lines(args, 0, 0, 0.0))["step"],
        services={service: model and hub_name(model[1]) for service, model in services.items()},
        spent=calls_and_usd(total.calls, total.usd) if total.calls else "not counted", ends=run.held_out.ends(),
        change_in_words=change_in_words, targets=args.kl_targets(), figure=logged.get, number=number,
        command=public_command(sys.argv),
        versions=[*(f"{each} {installed(each)}" for each in PACKAGES if installed(each)),
                  f"Python {platform.python_version()}"],
    )  # fmt: skip
    write_whole(folder / MODEL_CARD_FILE, text + "\n")


def hub_name(name: str) -> str:
    """A model's name: that of the hub, or the last part of a path."""
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not Path(name).exists()
    return name if is_id else Path(name).name or NOT_KNOWN


def public_command(argv: Sequence[str]) -> str:
    """The command without what may be private: values that are neither numbers nor words, and those of settings whose
    name speaks of a key or a place."""
    shown, name = [Path(argv[0]).name], ""
    for argument in argv[1:]:
        name, is_joined, value = argument.partition("=") if argument.startswith("--") else (name, "", argument)
        is_open = _PLAIN.fullmatch(value) and not is_secret(name) and not _PLACE.search(name)
        value = value if is_open else "..." * bool(value)
        shown.append(argument if argument == name else f"{name}{is_joined}{value}" if is_joined else value)
    return " ".join(shown)
