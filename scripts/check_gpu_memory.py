#!/usr/bin/env python3
"""Estimate a run's GPU memory by component before loading a model, and suggest a preset that fits.

    .venv/bin/python scripts/check_gpu_memory.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --card 80gb
    .venv/bin/python scripts/check_gpu_memory.py --config recipes/full.yaml --use_peft true --preset 40gb --card 40gb

Accepts every recipe setting; default: recipes/full.yaml. Without --card, inspects this machine's GPU and reports the
memory in use. `80gb` means 80e9 bytes, the least that GPUs sold under this name have. DeepSpeed and FSDP aren't
estimated: the preflight's stage `step` measures their memory.

Exit code: 0 fits; 2 invalid input; 3 doesn't fit.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from salesrl_trl.ground.command_line import ToolParser, ended, strict_json
from salesrl_trl.ground.shutdown import EXIT_FAILED, end_tidily

if __name__ == "__main__":
    end_tidily()  # before the imports that take seconds

from salesrl_trl.config.checks import Range, check_range
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.memory_estimate import Estimate, Setup
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight.memory import LESS, settle_precision, setup_of
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.settings import RunConfig, parse
from salesrl_trl.launch.software import Card, card_here, named_card

SOLD = ("24gb", "40gb", "80gb", "141gb")  # GPU sizes in ascending order, each with a preset


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return ended(argv, lambda: _examine(argv))


def _examine(argv: Sequence[str]) -> int:
    options, settings = _parser().parse_known_args(argv)
    check_range("prompt_tokens", options.prompt_tokens, Range(1))
    with contextlib.redirect_stdout(sys.stderr):  # for lines of other libraries
        config = parse(settings, FULL)
        card = card_here(config.training.device) if options.card is None else named_card(options.card)
        if card is None:
            raise ConfigError("no GPU was found. Expected a GPU size. Pass one, e.g. `--card 80gb`.")
        estimated, setup = _weigh(config, card, options)
        options.prompt_tokens = setup.prompt_tokens
        preset = None if estimated.fits else _preset(settings, card, options)
    formats, batch = {4: "float32", 2: "16 bits", 1: "8 bits"}, config.training.per_device_train_batch_size
    title = f"{config.model.model_name_or_path}, {'LoRA' if setup.lora else 'all weights'}, weights in "
    title += f"{formats[setup.weight_bytes]}, {batch} x {setup.prompt_tokens} + {setup.completion_tokens} tokens"
    if setup.kept_gib:
        title += f", {estimated.kept_gib:g} GiB of activations kept"
    if not options.json:
        print(_as_text(setup, estimated, preset, card, title))
    else:
        report = {
            "run": title,
            "card": {"name": card.name, "gib": card.gib, "used_gib": card.used_gib},
            "fits": estimated.fits,
            "needed_gib": estimated.needed_gib,
            "moments": {moment.name: dict(moment.parts) for moment in estimated.moments},
            "vllm_sequences": estimated.sequences,
            "preset": None if preset is None else {"name": preset[0], "needed_gib": preset[1]},
        }
        print(strict_json(report))
    return 0 if estimated.fits else EXIT_FAILED


def _weigh(config: RunConfig, card: Card, options: argparse.Namespace) -> tuple[Estimate, Setup]:
    """A run's estimate on this GPU, and its setup."""
    if config.model.model_name_or_path is None:
        raise ConfigError(
            "no model is set, and the built-in small policy fits every GPU. Expected `--model_name_or_path`."
        )
    if options.card is not None:  # this machine, without that GPU, may not have chosen 16 bits
        wish = config.recipe
        config.training.bf16 = not wish.get("fp16") if wish.get("bf16") is None else bool(wish["bf16"])
    plan = Plan(config)
    _ = plan.model_config  # raises without a model
    if (setup := setup_of(plan, card.gib, options.prompt_tokens)) is None:
        raise ConfigError("this kind of model can't be estimated. The preflight's stage `step` measures it.")
    try:
        settle_precision(plan, setup)
    except ConfigError:  # no number format fits, which the table shows
        plan.dtype = "float32"
    estimated = setup.weighed(plan.dtype, config.training.optim.value)
    return estimated, replace(setup, dtype=plan.dtype, optim=config.training.optim.value)


def _preset(settings: Sequence[str], card: Card, options: argparse.Namespace) -> tuple[str, float] | None:
    """The preset with which the run fits: this GPU's, or else the next larger one's. With its GiB."""
    smaller = [name for name in SOLD if _is_no_larger(name, card)]
    for name in [*smaller[-1:], *(name for name in SOLD if name not in smaller)]:
        where = card if name in smaller else named_card(name)
        with contextlib.suppress(ConfigError):  # a model whose layers PEFT doesn't know
            estimated, _ = _weigh(parse([*settings, "--preset", name], FULL), where, options)
            if estimated.fits:
                return name, estimated.needed_gib
    return None


def _is_no_larger(name: str, card: Card) -> bool:
    return named_card(name).gib <= card.gib + 1  # an 80 GB GPU may have a little less


def _as_text(setup: Setup, estimated: Estimate, preset: tuple[str, float] | None, card: Card, title: str) -> str:
    peak = estimated.peak
    lines = [title, f"on {card.name} ({card.gib:.1f} GiB), peak: {peak.name}", ""]
    lines += [f"  {part:<28}{gib:8.2f} GiB" for part, gib in peak.parts.items() if gib >= 0.005]
    lines += [f"  {'sum':<28}{estimated.needed_gib:8.2f} GiB", ""]
    others = sorted(estimated.moments, key=lambda moment: -moment.total_gib)[1:]
    lines.append("other moments: " + ", ".join(f"{moment.name} {moment.total_gib:.1f}" for moment in others))
    if estimated.sequences is not None:
        lines.append(
            f"vLLM's cache holds {estimated.sequences:.0f} full-length completions; a step generates {setup.rollouts}"
        )
    if card.used_gib:
        too_little = estimated.fits and card.used_gib + estimated.needed_gib > card.gib
        lines.append(f"in use now: {card.used_gib:.1f} GiB" + ". TOO LITTLE IS FREE: release some first" * too_little)
    if estimated.fits:
        return "\n".join([*lines, f"It fits, with {card.gib - estimated.needed_gib:.1f} GiB to spare."])
    if not estimated.starts_engine:
        lines.append("vLLM would not start: its share can't hold one full-length completion.")
    lines.append("It doesn't fit with these settings.")
    if preset is not None:
        name, gib = preset
        where = "It fits" if _is_no_larger(name, card) else f"It fits a {name} GPU"
        lines.append(f"{where} with `--preset {name}`: about {gib:.1f} GiB.")
    return "\n".join([*lines, LESS])


def _parser() -> ToolParser:
    parser = ToolParser(
        usage="%(prog)s [--config RECIPE.yaml] [--card 80gb] [--json] [--SETTING VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--card", help="GPU size, e.g. 24gb; default: this machine's GPU")
    parser.add_argument("--prompt_tokens", type=int, help="tokens per prompt; default: the longest one in the data")
    parser.add_argument("--json", action="store_true", help="print one JSON object, also on failure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
