"""The generation batch under way, and the rollouts in flight, in a checkpoint.

Owns the files of both, one for each process. `keeper` calls it. A run that stopped inside a generation batch resumes
with the completions that it had not trained on. With `save_rollouts` it also resumes with those that were generated
ahead.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger

from salesrl_trl.generation.sampler import Sampled
from salesrl_trl.names import ROLLOUTS_FILE, UNDER_WAY_FILE
from salesrl_trl.rollout.pipeline import KeptRollouts
from salesrl_trl.update.ranks import on_any_rank

logger = get_logger(__name__)

Batches = list[dict[str, object]]
"""The slices of a generation batch, as TRL keeps them."""


def save_under_way(folder: Path, rank: int, arrangement: list[int], batches: Batches) -> None:
    """Save the slices of one process's generation batch. Only slices of the same `arrangement`, the figures that
    decide how a batch is divided, can be used again."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"arrangement": arrangement, "batches": batches}, folder / UNDER_WAY_FILE.format(rank=rank))


def load_under_way(folder: Path, rank: int, arrangement: list[int], device: torch.device) -> Batches | None:
    """The slices of `save_under_way`. `None` on all ranks if any has none of this arrangement: without a batch TRL
    generates one, which is a collective. A collective."""
    state = _read(folder / UNDER_WAY_FILE.format(rank=rank), arrangement, device)
    if not on_any_rank(state is None, device):
        assert state is not None
        batches: Batches = state["batches"]
        return batches
    logger.warning(
        f"{folder} lies inside a generation batch. It does not hold the completions of this batch, or holds them for "
        "another number of processes or other batch sizes: they are generated anew, from the same prompts"
    )
    return None


def save_rollouts(folder: Path, rank: int, arrangement: list[int], in_flight: Mapping[int, KeptRollouts]) -> None:
    """Save one process's rollouts in flight, from `Pipeline.in_flight`. Those with pictures are left out."""
    rollouts = {
        first: {
            "rows": rollout.rows,
            "step": rollout.step,
            "generated": list(rollout.sampled.generated),
            "metrics": {name: [float(value) for value in values] for name, values in rollout.sampled.metrics.items()},
            "tokens": int(rollout.sampled.tokens),
            "behaviour_logps": rollout.behaviour_logps,
        }
        for first, rollout in in_flight.items()
        if not rollout.sampled.vision
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"arrangement": arrangement, "rollouts": rollouts}, folder / ROLLOUTS_FILE.format(rank=rank))


def load_rollouts(folder: Path, rank: int, arrangement: list[int], device: torch.device) -> dict[int, KeptRollouts]:
    """The rollouts of `save_rollouts`; a collective. No rank gets any if a rank has none of this arrangement."""
    state = _read(folder / ROLLOUTS_FILE.format(rank=rank), arrangement, device)
    if on_any_rank(state is None, device):
        return {}
    assert state is not None
    rollouts = {
        first: KeptRollouts(
            rows=rollout["rows"],
            step=rollout["step"],
            sampled=Sampled(
                generated=tuple(rollout["generated"]), metrics=rollout["metrics"], tokens=rollout["tokens"]
            ),
            behaviour_logps=rollout["behaviour_logps"],
        )
        for first, rollout in state["rollouts"].items()
    }
    logger.info(f"going on with {len(rollouts)} rollouts in flight")
    return rollouts


def _read(path: Path, arrangement: list[int], device: torch.device) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state if state["arrangement"] == arrangement else None
