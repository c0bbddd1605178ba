"""Routing in vLLM and in the trainer, of a small mixture of experts with random weights, on a CPU.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.experts \\
        [--kind qwen3 mixtral dense] [--engine bfloat16] [--trainer bfloat16] [--json FILE]

vLLM samples 64 completions of 64 tokens, one after another, and hooks on its routers keep what they say of each token.
The trainer's model (transformers) then passes the same tokens. Matrices are three times as large as transformers makes
them, so that routers prefer some experts. `dense` has no experts, for comparison.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.common import parser, write_json
from salesrl_trl.demo.packaged import packaged_tokenizer

PROMPTS, PROMPT, GROUP, TOKENS, LARGER = 16, 32, 4, 64, 3.0
SHAPE = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3MoeConfig(
        **SHAPE, intermediate_size=512, moe_intermediate_size=128, num_experts=32, num_experts_per_tok=4,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "mixtral": lambda: MixtralConfig(**SHAPE, intermediate_size=256, num_local_experts=8, num_experts_per_tok=2),
    "dense": lambda: Qwen3Config(**SHAPE, intermediate_size=512),
}  # fmt: skip


def save(kind: str, folder: Path) -> Any:
    """Write a model of this kind. Returns its configuration."""
    torch.manual_seed(0)
    tokenizer, config = packaged_tokenizer(), CONFIGS[kind]()
    config.vocab_size = len(tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(LARGER if weight.dim() > 1 else 1.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config


def measure(kind: str, engine: str, trainer: str, folder: Path) -> dict[str, Any]:
    """Differences of log-probs in nats (the trainer's minus vLLM's), and shares of other experts."""
    from vllm import LLM, SamplingParams

    config = save(kind, folder)
    most = 0 if kind == "dense" else config.num_experts_per_tok
    llm = LLM(str(folder), dtype=engine, enforce_eager=True, max_model_len=256, enable_prefix_caching=False,
              logprobs_mode="processed_logprobs", gpu_memory_utilization=0.2)  # fmt: skip
    worker = llm.llm_engine.model_executor.driver_worker
    inner = getattr(worker, "worker", worker).model_runner.model
    routers = [module for name, module in inner.named_modules() if name.endswith(".gate")]
    seen: list[list[torch.Tensor]] = [[] for _ in routers]
    for kept, router in zip(seen, routers, strict=True):
        router.register_forward_hook(lambda *given, kept=kept: kept.append(given[2][0].detach().float().clone()))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, trainer)).eval()
    draw, gaps, others = torch.Generator().manual_seed(1), [], []
    prompts = [torch.randint(5, config.vocab_size, (PROMPT,), generator=draw).tolist() for _ in range(PROMPTS)]
    for number, prompt in enumerate(prompts * GROUP):
        sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, seed=number)
        [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        ids, logprobs = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        with torch.no_grad():
            passed = model(torch.tensor([prompt + ids]), **({"output_router_logits": True} if most else {}))
        ours = passed.logits[0, PROMPT - 1 : -1].float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        gaps.append(ours - torch.tensor([each[token].logprob for each, token in zip(logprobs, ids, strict=True)]))
        if most:
            chosen = [torch.cat(kept).topk(most).indices.sort().values for kept in seen]
            mine = [logits.float().topk(most).indices.sort().values for logits in passed.router_logits]
            pairs = zip(chosen, mine, strict=True)  # vLLM does not pass the last token
            others.append(torch.stack([(one != two[: len(one)]).any(-1) for one, two in pairs], 1))  # (T, layers)
        for kept in seen:
            kept.clear()
    apart, sums = torch.cat(gaps).abs(), torch.stack(gaps).sum(1).abs()
    figures: dict[str, Any] = {"kind": kind, "engine": engine, "trainer": trainer, "tokens": len(apart)}
    figures |= {"mean": float(apart.mean()), "p99": float(apart.quantile(0.99)), "most": float(apart.max())}
    figures |= {"tokens_beyond_2": float((apart > 0.693).float().mean())}
    figures |= {"completions_beyond_3": float((sums > 1.0986).float().mean())}  # TRL's `sequence_mask` drops these
    if others:
        other = torch.cat(others)
        figures |= {
            "other_experts": float(other.float().mean()),
            "tokens_with_any": float(other.any(-1).float().mean()),
        }
    return figures


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure each kind and print it."""
    made = parser(__doc__)
    made.add_argument("--kind", nargs="+", choices=sorted(CONFIGS), default=[*CONFIGS])
    made.add_argument("--engine", default="bfloat16", help="number format of vLLM")
    made.add_argument("--trainer", default="bfloat16", help="number format of the trainer")
    args = made.parse_args(argv)
    rows = []
    for kind in args.kind:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(kind, args.engine, args.trainer, Path(folder)))
        print(rows[-1], flush=True)
    write_json(args.json, {"rows": rows})
    return rows


if __name__ == "__main__":
    main()
