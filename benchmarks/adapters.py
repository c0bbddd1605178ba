"""What LoRA costs beside its base: a pass forward and backward, with the casts of its inputs and without.

    python -m benchmarks.adapters [--shape 7b] [--tokens 4096] [--profile]

- `frozen` is the base alone, whose first layer's input needs a gradient. `casts` is LoRA on all linear layers as PEFT
  computes it. `spared` is without the casts, and `fused` is as this package trains it (`salesrl_trl.parts.lora`).
  `kept` is the same without gradient checkpointing. `head` is what these leave out: log-probs and entropies, as TRL
  computes them. `--liger` has Liger's kernels in the model, in all arms.
- Random weights in bfloat16, adapters in float32, autocast, gradient checkpointing, one row of `--tokens` tokens. The
  arms take turns.
- Loss and gradients of `casts` and `spared` must be equal to the bit. Both are compared with PyTorch's deterministic
  kernels: attention's backward pass on a GPU differs from itself without them. Those of `fused` differ by rounding.
- `--profile` prints the operations of `fused` that take longest, and on a GPU kernels of `frozen`, `head`, `fused`.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear, LoraLayer
from torch.profiler import profile
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.liger import apply_liger_kernel
from trl.kernels import ChunkedLogProbFunction

from benchmarks.common import SHAPES, device, device_name, kernels, now, parser, write_json
from salesrl_trl.launch.memory_estimate import TILE_VOCABULARY
from salesrl_trl.parts.lora import fuse, spare_casts

RANK, ROUNDS, KEPT = 16, 6, 64


def main(argv: Sequence[str] | None = None) -> None:
    """Time the arms, and print their medians."""
    where = device()
    made = parser(__doc__)
    made.add_argument("--shape", choices=sorted(SHAPES), default="7b" if where.type == "cuda" else "demo")
    made.add_argument("--tokens", type=int, default=4096 if where.type == "cuda" else 512)
    made.add_argument("--profile", action="store_true")
    made.add_argument("--liger", action="store_true")
    args = made.parse_args(argv)
    torch.manual_seed(0)
    with where:
        base = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPES[args.shape]), dtype=torch.bfloat16)
    if args.liger:
        apply_liger_kernel(base, {"fused_linear_cross_entropy": False})
    lora = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(base, lora).train()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    ids = torch.randint(0, base.config.vocab_size, (1, args.tokens), device=where)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast(where.type, torch.bfloat16):
            loss = model(input_ids=ids, logits_to_keep=KEPT, use_cache=False).logits.float().logsumexp(-1).mean()
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    def timed(call: Callable[[], Any]) -> float:
        start = now()
        call()
        return now() - start

    layers = [each for each in model.modules() if isinstance(each, LoraLayer)]

    def as_peft_does() -> None:
        for each in layers:
            each.__class__, each.cast_input_dtype_enabled = Linear, True

    def frozen() -> None:
        with model.disable_adapter():
            step()

    def kept() -> None:
        base.gradient_checkpointing_disable()
        step()
        base.gradient_checkpointing_enable({"use_reentrant": False})

    def head() -> None:
        hidden = torch.randn(args.tokens, base.config.hidden_size, device=where, requires_grad=True)
        with torch.autocast(where.type, torch.bfloat16):
            found = ChunkedLogProbFunction.apply(
                hidden.bfloat16(), base.lm_head.weight, None, ids[0], 1.0, TILE_VOCABULARY, None, 1.0, ("entropy",)
            )
        found[0].sum().backward()

    torch.use_deterministic_algorithms(True)
    expected = step()
    spare_casts(model, where.type)
    are_equal = all(map(torch.equal, expected, step()))
    assert not any(map(fuse, layers))
    apart = max(((a - b).norm() / a.norm()).item() for a, b in zip(expected, step(), strict=True))
    torch.use_deterministic_algorithms(False)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        as_peft_does()
        seconds["frozen"].append(timed(frozen))
        seconds["casts"].append(timed(step))
        spare_casts(model, where.type)
        seconds["spared"].append(timed(step))
        assert not any(map(fuse, layers))
        for arm, call in (("fused", step), ("kept", kept), ("head", head)):
            seconds[arm].append(timed(call))
    medians = {arm: statistics.median(each[1:]) for arm, each in seconds.items()}
    print(f"{args.shape} on {device_name(where)}, {args.tokens} tokens")
    print(f"`spared` equal to the bit: {are_equal}; `fused` off by {apart:.2g}")
    for arm, median in medians.items():
        print(f"{arm}: {median:.4f} s, {median / medians['casts']:.3f} of `casts`")
    if args.profile:
        for call in (frozen, head, step):
            with profile() as found:
                timed(call)
            print(f"{call.__name__}: kernels of a pass")
            kernels(found, prints=True)
        key = "self_cuda_time_total" if where.type == "cuda" else "self_cpu_time_total"
        print(found.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=60))
    write_json(args.json, {"equal": are_equal, "fused_off_by": apart, "seconds": seconds, "medians": medians})


if __name__ == "__main__":
    main()
