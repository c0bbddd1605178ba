"""`scripts/check_gpu_memory.py`: the estimate of a run as a table. Owns the command line and the wording."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from salesrl_trl.build.memory.cards import Card, card_here, named_card, used_gib, users
from salesrl_trl.build.memory.estimate import Estimate, advice
from salesrl_trl.build.memory.setup import Setup, Sharding
from salesrl_trl.build.plan import Plan
from salesrl_trl.build.recipes import FULL
from salesrl_trl.build.settings import RunConfig, parse
from salesrl_trl.config.ranges import Range, check_range
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_STOPPED
from salesrl_trl.preflight.memory import Scales, settle_precision
from salesrl_trl.run.tools import ToolParser, strict_json, tell_failure

SHARDINGS = {sharding.name.lower(): sharding for sharding in Sharding}
SOLD = ("24gb", "40gb", "80gb", "141gb")
"""Cards, the smallest first. Each has a preset."""


class _Weighed(NamedTuple):
    """An estimate, and the setup that was weighed."""

    estimate: Estimate
    setup: Setup


class _OtherPreset(NamedTuple):
    """A preset with which the run fits its card: the card that was asked for, or the smallest that is large enough."""

    name: str
    needed_gib: float


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
            weighed = _weigh(config, card, options)
            preset = None if weighed.estimate.fits else _preset(settings, card, options, weighed.setup.prompt_tokens)
    except Exception as error:
        tell_failure(error, as_json)
        return EXIT_BAD_INPUT
    title = f"{config.model.model_name_or_path}, {_trained(weighed.setup)}"
    print((_as_json if as_json else _as_text)(weighed, preset, card, title))
    return 0 if weighed.estimate.fits else EXIT_STOPPED


def _card(name: str | None, config: RunConfig) -> Card:
    if name is not None:
        return named_card(name)
    here = card_here(config.training.device)
    if here is None:
        raise ConfigError("there is no GPU here, and `--card` is not given. Expected a size, as in `--card 80gb`.")
    return here


def _weigh(config: RunConfig, card: Card, options: argparse.Namespace) -> _Weighed:
    if config.model.model_name_or_path is None:
        raise ConfigError(
            "no model is named, and the packaged small policy fits every card. Expected `--model_name_or_path`."
        )
    if options.card is not None:  # a machine without this card may not have settled for 16 bits
        wish = config.recipe
        config.training.bf16 = not wish.get("fp16") if wish.get("bf16") is None else bool(wish["bf16"])
    plan = Plan(config)
    _ = plan.model_config  # raises where there is no model
    sharding, processes = SHARDINGS[options.sharding], options.processes
    scales = Scales(plan, card.gib, options.prompt_tokens)
    if sharding is not Sharding.NONE or processes > 1:
        scales.sharding, scales.processes = sharding, processes
    plan.dtype = config.model.dtype
    if sharding is Sharding.NONE:
        try:
            settle_precision(plan, scales)
        except ConfigError:  # no number format fits: the table says so
            plan.dtype = "float32"
    return _Weighed(scales.weigh(plan.dtype), scales.setup(plan.dtype))


def _preset(
    settings: Sequence[str], card: Card, options: argparse.Namespace, prompt_tokens: int
) -> _OtherPreset | None:
    """The preset of this card, or of the smallest larger one, with which these settings fit that card."""
    options = argparse.Namespace(**{**vars(options), "prompt_tokens": prompt_tokens})
    sizes = {name: named_card(name) for name in SOLD}
    smaller = [name for name in SOLD if sizes[name].gib <= card.gib + 1]  # a card of 80 GB may have a little less
    for name in [*smaller[-1:], *(name for name in SOLD if name not in smaller)]:
        on = card if name in smaller else sizes[name]
        with contextlib.suppress(ConfigError):  # of a model whose layers PEFT does not know
            estimated = _weigh(parse([*settings, "--preset", name], FULL), on, options).estimate
            if estimated.fits:
                return _OtherPreset(name, estimated.needed_gib)
    return None


def _trained(setup: Setup) -> str:
    formats = {4: "float32", 2: "16 bits", 1: "8 bits"}
    what = "LoRA" if setup.lora else "all weights"
    split = f", {setup.sharding} over {setup.processes} processes" if setup.processes > 1 else ""
    return (
        f"{what}, weights in {formats[setup.weight_bytes]}, {setup.micro_batch} x {setup.prompt_tokens} + "
        f"{setup.completion_tokens} tokens{split}"
    )


def _as_text(weighed: _Weighed, preset: _OtherPreset | None, card: Card, title: str) -> str:
    estimated, setup = weighed
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
    if (used := used_gib(card)) is not None:
        named = users(card)
        text = f"in use now: {used:.1f} GiB" + (f", by {named}" if named else "")
        too_little = estimated.fits and used + estimated.needed_gib > card.gib
        lines.append(text + ". THIS LEAVES TOO LITTLE: end those processes first" * too_little)
    if estimated.fits:
        return "\n".join([*lines, f"It fits: {card.gib - estimated.needed_gib:.1f} GiB are left."])
    if not estimated.starts_engine:
        lines.append("vLLM would not start: its share has no room for one completion of full length.")
    lines.append("It does not fit as it is set.")
    if preset is not None:
        where = "It fits" if named_card(preset.name).gib <= card.gib + 1 else f"It fits a card of {preset.name}"
        lines.append(f"{where} with `--preset {preset.name}`: about {preset.needed_gib:.1f} GiB.")
    lines.append("What takes less, the cheapest first:")
    return "\n".join([*lines, *(f"  {setting}" for setting in advice(estimated, setup))])


def _as_json(weighed: _Weighed, preset: _OtherPreset | None, card: Card, title: str) -> str:
    estimated, setup = weighed
    return strict_json(
        {
            "run": title,
            "card": {"name": card.name, "gib": card.gib, "used_gib": used_gib(card)},
            "fits": estimated.fits,
            "needed_gib": estimated.needed_gib,
            "moments": {moment.name: dict(moment.parts) for moment in estimated.moments},
            "vllm_sequences": estimated.sequences,
            "setup": asdict(setup),
            "preset": None if preset is None else preset._asdict(),
            "remedies": [] if estimated.fits else advice(estimated, setup),
        }
    )


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
