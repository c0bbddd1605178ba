"""Settings of the small policy, for runs that name no model. TRL's `ModelConfig` has those of a named model."""

from dataclasses import dataclass, field

from salesrl_trl.config.checks import about
from salesrl_trl.config.ranges import WARM_START, check_ranges


@dataclass
class WarmStartConfig:
    """The small policy, which is made at the start of a run without `model_name_or_path`, and cached.

    Args:
        warm_start_steps (`int`, *optional*, defaults to `280`):
            Steps of supervised fine-tuning on the demo's draft actions.
        warm_start_seed (`int`, *optional*, defaults to `0`):
            Seed of its weights and of its data order. Each seed has a cache entry of its own.
    """

    warm_start_steps: int = field(default=280, metadata=about("Steps of supervised fine-tuning of the small policy."))
    warm_start_seed: int = field(default=0, metadata=about("Seed of the small policy."))

    def __post_init__(self) -> None:
        check_ranges(self, WARM_START)
