"""The small policy of a run that names no model. Owns its making; a model that is named is TRL's `ModelConfig`."""

from dataclasses import dataclass, field

from salesrl_trl.config.checks import about, check_positive


@dataclass
class WarmStartConfig:
    """The small policy that is made on the spot when no `model_name_or_path` is given.

    Args:
        warm_start_steps (`int`, *optional*, defaults to `280`):
            Steps of supervised fine-tuning on the demo's draft actions.
        warm_start_seed (`int`, *optional*, defaults to `0`):
            Seed of its weights and data order. Each seed is cached by itself.
    """

    warm_start_steps: int = field(default=280, metadata=about("SFT steps of the small policy"))
    warm_start_seed: int = field(default=0, metadata=about("seed of the small policy"))

    def __post_init__(self) -> None:
        check_positive(self, "warm_start_steps")
