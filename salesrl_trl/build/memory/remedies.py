"""Settings that take less memory, the cheapest first, each with the GiB that it saves. Changes none of them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from salesrl_trl.build.memory.cards import named_card
from salesrl_trl.build.memory.estimate import Estimate, estimate
from salesrl_trl.build.memory.setup import Setup, Sharding
from salesrl_trl.build.memory.shape import ModelShape

SEQUENCES = 8
"""Completions of full length at once, below which generation on vLLM would wait much."""
STEP = 0.05
"""The vLLM share is rounded up to a multiple of this."""
LEAST_GIB = 0.05
"""A change that saves no more than this is left out."""
SOLD = ("24gb", "40gb", "80gb", "141gb")
"""Cards, the smallest first. Each has a preset."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change of the settings."""

    setting: str
    """As a recipe has it."""
    cost: str
    """Its price, in words."""
    saved_gib: float
    """By this change alone; negative where it takes more."""
    together: Estimate
    """With this change and those before it."""


def remedies(shape: ModelShape, setup: Setup, card_gib: float) -> list[Remedy]:
    """The changes that are possible, in the order of their cost.

    Args:
        shape (`ModelShape`):
            Figures of the policy, with adapters.
        setup (`Setup`), card_gib (`float`):
            As in `estimate`.
    """
    now = estimate(shape, setup, card_gib)
    found, changed = [], setup
    for change in _CHANGES:
        alone, after_all = change(shape, setup, card_gib), change(shape, changed, card_gib)
        if alone is None or after_all is None:
            continue
        _, cost, after = alone
        alone_gib = estimate(shape, after, card_gib)
        saved = now.needed_gib - alone_gib.needed_gib
        if saved <= LEAST_GIB and alone_gib.starts_engine is now.starts_engine:
            continue
        setting, _, changed = after_all
        found.append(Remedy(setting, cost, saved, estimate(shape, changed, card_gib)))
    return found


def advice(shape: ModelShape, setup: Setup, card_gib: float) -> str:
    """The changes in a sentence, up to the first with which it fits; or the smallest card on which it can fit."""
    shown = []
    for remedy in remedies(shape, setup, card_gib):
        shown.append(f"`{remedy.setting}` ({-remedy.saved_gib:+.1f} GiB)")
        if remedy.together.fits:
            return f"Set {', '.join(shown)}: then about {remedy.together.needed_gib:.1f} GiB."
    found = (card for card in SOLD if any(each.together.fits for each in remedies(shape, setup, named_card(card).gib)))
    larger = next(found, None)
    card = f"a card of {larger}" if larger else f"more cards: {SOLD[-1]} is too little"
    return f"Not enough, all together: {', '.join(shown)}. With them it takes {card}, or a smaller model."


_Change = tuple[str, str, Setup] | None
_Changes = Callable[[ModelShape, Setup, float], _Change]


def _smaller_evaluation(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    """The largest batch with which no evaluation is the fullest moment."""
    smaller = setup
    while smaller.evaluated > 1 and estimate(shape, smaller, card_gib).peak.name == "evaluation":
        smaller = replace(smaller, evaluated=smaller.evaluated // 2)
    if smaller == setup:
        return None
    return f"per_device_eval_batch_size: {smaller.evaluated}", "evaluations take more passes", smaller


def _smaller_pass(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    if setup.group is None or setup.pass_tokens == 1:
        return None
    alone = replace(setup, pass_tokens=1)
    return "shared_prompts: 1", "micro-batches go through the model one by one", alone


def _checkpointing(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    if setup.checkpointing:
        return None
    return "gradient_checkpointing: true", "each block is computed twice", replace(setup, checkpointing=True)


def _smaller_batch(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    """The largest micro-batch that fits, else 1. The update stays the same."""
    smaller = list(_halves(setup))
    if not smaller:
        return None
    best = next((each for each in smaller if estimate(shape, each, card_gib).fits), smaller[-1])
    setting = f"per_device_train_batch_size: {best.micro_batch}, gradient_accumulation_steps: {best.micro_batches}"
    return setting, "the same update in more, smaller passes", best


def _halves(setup: Setup) -> Iterator[Setup]:
    while setup.micro_batch % 2 == 0:
        setup = replace(setup, micro_batch=setup.micro_batch // 2, micro_batches=setup.micro_batches * 2)
        yield setup


def _other_share(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    """The least share of vLLM with room for some completions: a smaller one, or a larger where vLLM can't start."""
    if setup.engine is None:
        return None
    wanted = min(SEQUENCES, setup.rollouts)
    starts = estimate(shape, setup, card_gib).starts_engine
    cost = "vLLM generates fewer completions at once" if starts else "vLLM does not start with less"
    for steps in range(1, math.ceil((setup.engine.share if starts else 1.0) / STEP)):
        other = replace(setup, engine=replace(setup.engine, share=round(steps * STEP, 2)))
        if (estimate(shape, other, card_gib).sequences or 0) >= wanted:
            return f"vllm_gpu_memory_utilization: {steps * STEP:.2f}", cost, other
    return None


def _sleep(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    if setup.engine is None or setup.engine.sleeps:
        return None
    slept = replace(setup, engine=replace(setup.engine, sleeps=True))
    return "vllm_enable_sleep_mode: true", "vLLM gets its weights and its cache anew at every step", slept


def _rounding(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    if setup.lora or setup.weight_bytes == 2 or not setup.autocast or setup.sharding is not Sharding.NONE:
        return None
    rounded = replace(setup, weight_bytes=2, optim="adamw_torch_8bit")
    return "optim: adamw_torch_8bit, optim_args: bf16_stochastic_round=True", "rounded updates; torchao", rounded


def _lora(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    if setup.lora:
        return None
    adapted = replace(setup, lora=True, lora_dropout=True, weight_bytes=setup.compute_bytes, optim="adamw_torch_fused")
    return "use_peft: true", "adapters are trained in place of all weights; `learning_rate` higher", adapted


def _zero2(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    return _zero(setup, Sharding.ZERO2) if setup.sharding is Sharding.NONE else None


def _zero3(shape: ModelShape, setup: Setup, card_gib: float) -> _Change:
    return _zero(setup, Sharding.ZERO3) if not setup.sharding.splits_weights else None


def _zero(setup: Setup, sharding: Sharding) -> tuple[str, str, Setup]:
    """DeepSpeed on twice the cards."""
    cards = setup.processes if setup.processes > 1 else 2
    split = replace(setup.sharded(sharding, cards), optim="adamw_torch_fused")
    return f"DeepSpeed {sharding} on {cards} cards", "more cards, which exchange gradients", split


_CHANGES: tuple[_Changes, ...] = (
    _smaller_evaluation, _smaller_pass, _checkpointing, _smaller_batch, _other_share, _sleep, _rounding, _lora,
    _zero2, _zero3,
)  # fmt: skip
