"""`scripts/check_gpu_memory.py`: the estimate of a run as a table. Owns the command line and the wording."""

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from salesrl_trl.build.memory.cards import Card, card_here, named_card, named_users, used_gib
from salesrl_trl.build.memory.estimate import Estimate, estimate
from salesrl_trl.build.memory.remedies import Remedy, advice, remedies
from salesrl_trl.build.memory.setup import Setup, Sharding
from salesrl_trl.build.plan import Plan
from salesrl_trl.build.recipes import FULL
from salesrl_trl.build.settings import RunConfig, parse
from salesrl_trl.config.ranges import Range, check_range
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_FAILED
from salesrl_trl.preflight.memory import Scales, settle_precision
from salesrl_trl.run.tools import ToolParser, print_failure, strict_json

SHARDINGS = {each.name.lower(): each for each in Sharding}


def main(description: str | None, argv: Sequence[str] | None = None) -> int:
    """Print the table. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    as_json = "--json" in argv
    try:
        options, settings = _parser(description).parse_known_args(argv)
        for name in ("processes", "prompt_tokens"):
            check_range(name, getattr(options, name), Range(1))
        with contextlib.redirect_stdout(sys.stderr):  # for lines of other libraries
            config = parse(settings, FULL)
            card = _card(options.card, config)
            setup, scales = _setup(config, card, options)
            found = estimate(scales.adapted, setup, card.gib)
            changes = [] if found.fits else remedies(scales.adapted, setup, card.gib)
    except Exception as error:
        print_failure(error, as_json)
        return EXIT_BAD_INPUT
    show = _as_json if as_json else _as_text
    print(show(found, setup, changes, card, f"{scales.source[0]}, {_trained(setup)}"))
    if not found.fits and not as_json:
        print(advice(scales.adapted, setup, card.gib))
    return 0 if found.fits else EXIT_FAILED


def _card(name: str | None, config: RunConfig) -> Card:
    here = card_here(config.training.device)
    if name is not None:
        return named_card(name)
    if here is None:
        raise ConfigError("there is no GPU here, and `--card` is not given. Expected a size, as in `--card 80gb`.")
    return here


def _setup(config: RunConfig, card: Card, options: argparse.Namespace) -> tuple[Setup, Scales]:
    """The setup, and what weighed it."""
    if config.model.model_name_or_path is None:
        raise ConfigError(
            "no model is named, and the packaged small policy fits every card. Expected `--model_name_or_path`."
        )
    if options.card is not None:  # a machine without this card may not have settled for 16 bits
        wish = config.recipe
        config.training.bf16 = not wish.get("fp16") if wish.get("bf16") is None else bool(wish["bf16"])
    plan = Plan(config)
    _ = plan.model_config  # raises where there is no model
    scales = Scales(plan, card.gib, options.prompt_tokens)
    sharding = SHARDINGS[options.sharding]
    if sharding is Sharding.NONE:
        try:
            settle_precision(plan, scales)
        except ConfigError:  # no number format fits: the table says so
            plan.dtype = "float32"
    else:
        plan.dtype = config.model.dtype
    setup = scales.setup(plan.dtype)
    if sharding is not Sharding.NONE or options.processes > 1:
        setup = setup.sharded(sharding, options.processes)
    return setup, scales


def _trained(setup: Setup) -> str:
    formats = {4: "float32", 2: "16 bits", 1: "8 bits"}
    what = "LoRA" if setup.lora else "all weights"
    split = f", {setup.sharding} over {setup.processes} processes" if setup.processes > 1 else ""
    return (
        f"{what}, weights in {formats[setup.weight_bytes]}, {setup.micro_batch} x {setup.prompt_tokens} + "
        f"{setup.completion_tokens} tokens{split}"
    )


def _as_text(found: Estimate, setup: Setup, changes: Sequence[Remedy], card: Card, title: str) -> str:
    peak = found.peak
    lines = [title, f"on {card.name} ({card.gib:.1f} GiB), at its fullest: {peak.name}", ""]
    lines += [f"  {part:<28}{gib:8.2f} GiB" for part, gib in peak.parts.items() if gib >= 0.005]
    lines += [f"  {'sum':<28}{found.needed_gib:8.2f} GiB", ""]
    others = sorted(found.moments, key=lambda moment: -moment.total_gib)[1:]
    lines.append("other moments: " + ", ".join(f"{moment.name} {moment.total_gib:.1f}" for moment in others))
    if found.sequences is not None:
        lines.append(
            f"vLLM's cache has room for {found.sequences:.0f} completions of full length at once; "
            f"{setup.rollouts} are generated"
        )
    lines += _in_use(card, found)
    if found.fits:
        return "\n".join([*lines, f"It fits: {card.gib - found.needed_gib:.1f} GiB are left."])
    if not found.starts_engine:
        lines.append("vLLM would not start: its share has no room for one completion of full length.")
    lines += ["It does not fit. Settings that take less, the cheapest first, each alone and with all above it:", ""]
    for change in changes:
        fits = "fits" if change.together.fits else "does not fit"
        lines.append(
            f"  {change.setting}\n      {-change.saved_gib:+.1f} GiB alone ({change.cost}); with all above "
            f"{change.together.needed_gib:.1f} GiB: {fits}"
        )
    return "\n".join(lines)


def _in_use(card: Card, found: Estimate) -> list[str]:
    used = used_gib(card)
    if used is None:
        return []
    named = named_users(card)
    text = f"in use now: {used:.1f} GiB" + (f", by {named}" if named else "")
    if found.fits and used + found.needed_gib > card.gib:
        text += ". THIS LEAVES TOO LITTLE: end those processes first"
    return [text]


def _as_json(found: Estimate, setup: Setup, changes: Sequence[Remedy], card: Card, title: str) -> str:
    figures: Mapping[str, object] = {
        "run": title,
        "card": {"name": card.name, "gib": card.gib, "used_gib": used_gib(card)},
        "fits": found.fits,
        "needed_gib": found.needed_gib,
        "moments": {moment.name: dict(moment.parts) for moment in found.moments},
        "vllm_sequences": found.sequences,
        "setup": asdict(setup),
        "remedies": [
            {"setting": each.setting, "saved_gib": each.saved_gib, "together_gib": each.together.needed_gib}
            for each in changes
        ],
    }
    return strict_json(figures)


def _parser(description: str | None) -> ToolParser:
    parser = ToolParser(
        usage="%(prog)s [--config RECIPE.yaml] [--card 80gb] [--json] [--SETTING VALUE ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--card", help="size of the card, such as 24gb; default: the card in this machine")
    parser.add_argument("--sharding", choices=SHARDINGS, default="none", help="states that processes share")
    parser.add_argument("--processes", type=int, default=1, help="processes that train together, a card each")
    parser.add_argument("--prompt_tokens", type=int, help="tokens of a prompt; default: the longest of the data")
    parser.add_argument("--json", action="store_true", help="print one JSON object; of a failure too")
    return parser
