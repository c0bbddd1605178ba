"""The settings of a run for the trackers of `report_to`.

Owns how each tracker takes them. A tracker that `report_to` does not name is not imported.
"""

from collections.abc import Mapping
from dataclasses import fields

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from salesrl_trl.build.settings import RunConfig
from salesrl_trl.config.keys import without_keys
from salesrl_trl.telemetry.trackers import spared

Settings = Mapping[str, object]


def settings_beside_the_trainers(config: RunConfig) -> dict[str, dict[str, object]]:
    """The settings that are not the trainer's, by owner, as the recipe gives them."""
    owners = {"data": config.data, "reward": config.reward, "telemetry": config.telemetry, "model": config.model}
    return {
        owner: {field.name: config.recipe[field.name] for field in fields(part) if field.name in config.recipe}
        for owner, part in owners.items()
    }


class RunSettings(TrainerCallback):
    """Gives the trackers the settings that are not the trainer's, without keys, under names such as `reward.top_k`.

    transformers gives them the trainer's own.
    """

    def __init__(self, settings: Mapping[str, Settings]) -> None:
        self._settings = {
            f"{owner}.{name}": value
            for owner, values in settings.items()
            for name, value in without_keys(values).items()  # type: ignore[attr-defined]
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if state.is_world_process_zero:
            for name in args.report_to:
                with spared(f"the settings for {name}"):
                    _configured(name, self._settings)


def _configured(tracker: str, settings: Settings) -> None:
    if tracker == "mlflow":
        import mlflow

        names, most = [*settings], mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH
        for first in range(0, len(names), most):
            mlflow.log_params({name: settings[name] for name in names[first : first + most]}, synchronous=False)
    elif tracker == "swanlab":
        import swanlab

        swanlab.config.update(dict(settings))
    elif tracker == "trackio":
        import trackio

        trackio.config.update(dict(settings), allow_val_change=True)
    elif tracker == "wandb":
        import wandb

        wandb.config.update(dict(settings), allow_val_change=True)
