"""A run's model card, which replaces TRL's: the model, its training, its rewards and the results.

Ensures that it contains no row's text, address, key or path. `model_card.jinja` is the template.
"""

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import TrainerState

from salesrl_trl import __version__
from salesrl_trl.config.keys import is_secret
from salesrl_trl.ground.process import installed, write_whole
from salesrl_trl.ground.texts import NOT_KNOWN, filled, number
from salesrl_trl.names import MODEL_CARD_FILE, SAVING_FOLDER
from salesrl_trl.parts.run_banner import training_lines
from salesrl_trl.telemetry.logs import spared
from salesrl_trl.wiring.part import Part, PartContext

PACKAGES = ("trl", "transformers", "torch", "peft", "vllm")
_PLAIN = re.compile(r"[+-]?\d*\.?\d+(e[+-]?\d+)?|[A-Za-z_]\w*")
_PLACE = re.compile("url|host|address|server|path|dir|file|folder|id|name|dataset|text|prompt|env", re.IGNORECASE)


class ModelCard(Part):
    """Writes the model card next to each saved policy."""

    def connect(self, run: PartContext) -> None:
        self._run = run
        self._model = run.trl.model()
        self._folder = str(Path(run.args.output_dir).resolve())  # while a checkpoint is saved, `output_dir` is another

    def on_policy_saved(self, folder: Path, state: TrainerState, given: Mapping[str, Any]) -> None:
        with spared("the model card"):
            write_whole(folder / MODEL_CARD_FILE, self._text(state, **given) + "\n")

    def _text(
        self,
        state: TrainerState,
        name: str | None = None,
        dataset: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> str:
        """The model card. `name`, `dataset` and `tags` are optional user input."""
        run, args, model = self._run, self._run.args, self._model
        is_adapter = any(isinstance(module, BaseTunerLayer) for module in model.modules())
        place, names = model.name_or_path, run.reward_loop.reward.names
        base = hub_name(place)
        if name in (None, SAVING_FOLDER):  # TRL passes the latter for a checkpoint being written
            name = (args.hub_model_id or self._folder).rpartition("/")[2]
        metadata = ModelCardData(
            base_model=base if base == place else None,
            datasets=dataset if dataset and dataset == hub_name(dataset) else None,
            library_name="peft" if is_adapter else "transformers",
            model_name=name,
            pipeline_tag="image-text-to-text" if hasattr(model.config, "vision_config") else "text-generation",
            tags=sorted({"generated_from_trainer", "trl", "grpo", "salesrl_trl", *(tags or ())}),
        )
        models = {service: re.fullmatch(r"model (.+) at \S+", where) for service, where in names.places.items()}
        spending = run.run_control.spending
        values: dict[str, object] = {"ends": ()}  # of evaluations, which are optional
        for part in run.parts:
            values |= part.card_values()
        return filled(
            Path(__file__).with_name("model_card.jinja"), metadata=metadata.to_yaml(), name=name, base=base, args=args,
            state=state, rewards=dict(zip(run.trl.reward_names, run.trl.reward_weights, strict=True)),
            services={service: found and hub_name(found[1]) for service, found in models.items()},
            has_meter=names.meter is not None, is_adapter=is_adapter,
            spent="0 calls" if spending is None else spending.in_words(),
            step=dict(training_lines(args, 0, 0, 0.0))["step"],
            figure={tag: value for entry in state.log_history for tag, value in entry.items()}.get,  # the last of each
            number=number, command=public_command(sys.argv), python=platform.python_version(), version=__version__,
            versions={package: version for package in PACKAGES if (version := installed(package)) is not None},
            **values,
        )  # fmt: skip


def hub_name(name: str) -> str:
    """A model's name: its hub id, or the last component of its path."""
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not Path(name).exists()
    return name if is_id else Path(name).name or NOT_KNOWN


def public_command(argv: Sequence[str]) -> str:
    """The command without potentially private values: those that are neither numbers nor words, and those of settings
    whose name suggests a key or a location."""
    shown, name = [Path(argv[0]).name], ""
    for argument in argv[1:]:
        name, is_joined, value = argument.partition("=") if argument.startswith("--") else (name, "", argument)
        is_open = _PLAIN.fullmatch(value) and not is_secret(name) and not _PLACE.search(name)
        value = value if is_open or not value else "..."
        shown.append(argument if argument == name else f"{name}{is_joined}{value}" if is_joined else value)
    return " ".join(shown)
