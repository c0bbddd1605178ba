"""The identity of a run: inputs that its checkpoints depend on, i.e. rows, branches, settings that determine the
prompt order, and initial weights. Resuming with others is rejected, as it would repeat or lose prompts, or change the
reference."""

import hashlib
import json
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from pathlib import Path

import torch
from datasets import Dataset

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import ConfigError
from salesrl_trl.names import IDENTITY_FILE

PROMPTS = "prompts in a generation batch"
UNDER_WAY = "processes x batch, steps x iterations of the generation batch under way"
"""Name of an input not stored in checkpoints between two generation batches, where it does not matter."""
_PER_WEIGHT = 32
"""Values of each weight included in the digest. Training changes some of them in every weight."""

Identity = dict[str, object]  # JSON values by input name


def rows_of(prompts: Iterable[object], branches: Iterable[str]) -> str:
    """Number and digest of the training rows: `"240 (5f2c8b1e9a40)"`. The digest covers prompts and branches."""
    digest, count = hashlib.sha256(), 0
    for count, row in enumerate(zip(prompts, branches, strict=True), start=1):  # noqa: B007  counted after the loop
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(text.encode("utf-8", "surrogatepass"))
    return f"{count} ({digest.hexdigest()[:12]})"


def weights_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of a few values of each weight, independent of dtype as long as it can represent bfloat16. A collective
    under ZeRO-3."""
    digest = hashlib.sha256()
    for name, weight in weights:
        if "lora_" not in name:  # adapters are initialised randomly
            with _gathered(weight):
                values = weight.detach().flatten()
                values = values[:: max(1, len(values) // _PER_WEIGHT)][:_PER_WEIGHT].to(torch.bfloat16)
                digest.update(values.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def shape_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A model's number of weights and a digest of their names and shapes: `"1.21 M (5f2c8b1e9a40)"`."""
    shapes = {name: tuple(getattr(weight, "ds_shape", weight.shape)) for name, weight in weights}
    size = sum(math.prod(shape) for shape in shapes.values())
    return f"{size / 1e6:,.2f} M ({hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:12]})"


def _gathered(weight: torch.Tensor) -> AbstractContextManager[object]:
    """While active, this process has the whole weight, which ZeRO-3 partitions at load time."""
    if not hasattr(weight, "ds_id"):
        return nullcontext()
    import deepspeed  # an optional dependency

    return deepspeed.zero.GatheredParameters([weight])  # type: ignore[no-any-return]


def identity_of(
    args: SalesGRPOConfig, rows: str | None, weights: str | None = None, shape: str | None = None
) -> Identity:
    """The identity of a run with these settings, omitting rows, weights and shape if `None`."""
    batch, group = args.generation_batch_size, args.num_generations
    steps, iterations = args.steps_per_generation, args.num_iterations
    assert batch is not None and steps is not None  # set by TRL
    decides = {
        "training rows": rows,
        "branches": ", ".join(args.branches),
        "seed": args.seed,
        "shuffle_dataset": args.shuffle_dataset,
        PROMPTS: batch // group,
        "generation batches an optimizer step": str(Fraction(args.gradient_accumulation_steps, steps * iterations)),
        UNDER_WAY: f"{args.world_size} x {args.per_device_train_batch_size}, {steps} x {iterations}",
        "weights of the model": shape,
        "weights at the start": weights,
        "optim": args.optim if args.is_sharded else None,  # its sharded state cannot be reinitialised
    }
    return {name: value for name, value in decides.items() if value is not None}


def identity_of_run(
    args: SalesGRPOConfig, dataset: object, branches: Branches, weights: str | None, shape: str
) -> Identity:
    """The identity of a run on this dataset, with the rows of a `datasets.Dataset`; others can't be read twice."""
    rows = None
    if isinstance(dataset, Dataset) and "prompt" in dataset.column_names:
        rows = rows_of(dataset["prompt"], branches.of_rows(dataset))
    return identity_of(args, rows, weights, shape)


def write_identity(checkpoint: Path, identity: Identity, inside_a_batch: bool) -> None:
    """Write the identity to a checkpoint. `inside_a_batch`: the checkpoint is in the middle of a generation batch."""
    decides = {name: value for name, value in identity.items() if inside_a_batch or name != UNDER_WAY}
    text = json.dumps({"decides": decides}, indent=2, ensure_ascii=False)
    (checkpoint / IDENTITY_FILE).write_text(text + "\n", encoding="utf-8")


def check_identity(checkpoint: Path, identity: Identity, allowed: bool) -> str | None:
    """Compare a run with the checkpoint it resumes from. Returns a line to log. Raises `ConfigError` if the saved
    identity is unreadable, or differs without being `allowed`."""
    path = checkpoint / IDENTITY_FILE
    if not path.is_file():
        return f"{checkpoint} lacks {IDENTITY_FILE}: its rows and branches cannot be compared with this run's"
    try:
        saved: Identity = json.loads(path.read_text(encoding="utf-8"))["decides"]
        pairs = [(name, was, identity[name]) for name, was in saved.items() if name in identity]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is unreadable ({type(error).__name__}): the run may have ended while writing the checkpoint. "
            "Expected the inputs of the checkpoint's run. Resume from an earlier checkpoint, or delete the file to "
            "skip this check."
        ) from None
    differences = "; ".join(f"{name} was {was}, is {now}" for name, was, now in pairs if now != was)
    if differences and not allowed:
        sizes = {Fraction(f"{was}/{now}") for name, was, now in pairs if name == PROMPTS and was != now}
        whole = [size for size in sizes if size.denominator == 1 and size > 0]
        factor = "".join(f", or multiply `gradient_accumulation_steps` by {size}" for size in whole)
        raise ConfigError(
            f"{checkpoint} belongs to another run: {differences}. Expected the same inputs. Use the earlier ones"
            f"{factor}; or start from the beginning, without `resume_from_checkpoint` and in another `output_dir`; or "
            "set `allow_changed_resume: true`, which may repeat or skip prompts."
        )
    return f"resuming from {checkpoint}, which belongs to another run: {differences}" if differences else None
