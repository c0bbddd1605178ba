#!/usr/bin/env python3
"""The memory of a run on a card, by parts, before a model is loaded, and the preset that takes less.

    .venv/bin/python scripts/check_gpu_memory.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --card 80gb
    .venv/bin/python scripts/check_gpu_memory.py --config recipes/full.yaml --use_peft true --preset 40gb --card 40gb

Takes every setting of a recipe; default: recipes/full.yaml. Without --card it reads the card of this machine, and says
what is in use now. `80gb` is 80e9 bytes, the least that cards of this name have. The run is one
without DeepSpeed and FSDP, whose memory the preflight's stage `step` measures.

Exit code: 0 it fits; 2 bad input; 3 it does not fit.
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
from salesrl_trl.launch.memory_estimate import Estimate, Setup, estimate
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight.memory import LESS, settle_precision, setup_of
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.settings import RunConfig, parse
from salesrl_trl.launch.software import Card, card_here, named_card

SOLD = ("24gb", "40gb", "80gb", "141gb")  # cards, the smallest first. Each has a preset.


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
            raise ConfigError("there is no GPU here. Expected a size of a card. Give one, as in `--card 80gb`.")
        estimated, setup = _weigh(config, card, options)
        options.prompt_tokens = setup.prompt_tokens
        preset = None if estimated.fits else _preset(settings, card, options)
    formats, batch = {4: "float32", 2: "16 bits", 1: "8 bits"}, config.training.per_device_train_batch_size
    title = f"{config.model.model_name_or_path}, {'LoRA' if setup.lora else 'all weights'}, weights in "
    title += f"{formats[setup.weight_bytes]}, {batch} x {setup.prompt_tokens} + {setup.completion_tokens} tokens"
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
    """The estimate of a run on a card, and its setup."""
    if config.model.model_name_or_path is None:
        raise ConfigError(
            "no model is named, and the packaged small policy fits every card. Expected `--model_name_or_path`."
        )
    if options.card is not None:  # a machine without this card may not have settled for 16 bits
        wish = config.recipe
        config.training.bf16 = not wish.get("fp16") if wish.get("bf16") is None else bool(wish["bf16"])
    plan = Plan(config)
    _ = plan.model_config  # raises where there is no model
    if (setup := setup_of(plan, card.gib, options.prompt_tokens)) is None:
        raise ConfigError("there is no estimate for a model of this kind. The preflight's stage `step` measures.")
    try:
        settle_precision(plan, setup)
    except ConfigError:  # no number format fits: the table says so
        plan.dtype = "float32"
    setup = replace(setup, dtype=plan.dtype, optim=config.training.optim.value)
    return estimate(setup), setup


def _preset(settings: Sequence[str], card: Card, options: argparse.Namespace) -> tuple[str, float] | None:
    """The preset of this card, or of the smallest larger one, with which the run fits that card, and its GiB."""
    smaller = [name for name in SOLD if _is_no_larger(name, card)]
    for name in [*smaller[-1:], *(name for name in SOLD if name not in smaller)]:
        where = card if name in smaller else named_card(name)
        with contextlib.suppress(ConfigError):  # of a model whose layers PEFT does not know
            estimated, _ = _weigh(parse([*settings, "--preset", name], FULL), where, options)
            if estimated.fits:
                return name, estimated.needed_gib
    return None


def _is_no_larger(name: str, card: Card) -> bool:
    return named_card(name).gib <= card.gib + 1  # a card of 80 GB may have a little less


def _as_text(setup: Setup, estimated: Estimate, preset: tuple[str, float] | None, card: Card, title: str) -> str:
    peak = estimated.peak
    lines = [title, f"on {card.name} ({card.gib:.1f} GiB), at its fullest: {peak.name}", ""]
    lines += [f"  {part:<28}{gib:8.2f} GiB" for part, gib in peak.parts.items() if gib >= 0.005]
    lines += [f"  {'sum':<28}{estimated.needed_gib:8.2f} GiB", ""]
    others = sorted(estimated.moments, key=lambda moment: -moment.total_gib)[1:]
    lines.append("other moments: " + ", ".join(f"{moment.name} {moment.total_gib:.1f}" for moment in others))
    if estimated.sequences is not None:
        lines.append(
            f"vLLM's cache has room for {estimated.sequences:.0f} completions of full length at once; "
            f"{setup.rollouts} are generated"
        )
    if card.used_gib:
        too_little = estimated.fits and card.used_gib + estimated.needed_gib > card.gib
        lines.append(f"in use now: {card.used_gib:.1f} GiB" + ". THIS LEAVES TOO LITTLE: free it first" * too_little)
    if estimated.fits:
        return "\n".join([*lines, f"It fits: {card.gib - estimated.needed_gib:.1f} GiB are left."])
    if not estimated.starts_engine:
        lines.append("vLLM would not start: its share has no room for one completion of full length.")
    lines.append("It does not fit as it is set.")
    if preset is not None:
        name, gib = preset
        where = "It fits" if _is_no_larger(name, card) else f"It fits a card of {name}"
        lines.append(f"{where} with `--preset {name}`: about {gib:.1f} GiB.")
    return "\n".join([*lines, LESS])


def _parser() -> ToolParser:
    parser = ToolParser(
        usage="%(prog)s [--config RECIPE.yaml] [--card 80gb] [--json] [--SETTING VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--card", help="size of the card, such as 24gb; default: the card in this machine")
    parser.add_argument("--prompt_tokens", type=int, help="tokens of a prompt; default: the longest of the data")
    parser.add_argument("--json", action="store_true", help="print one JSON object; of a failure too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
