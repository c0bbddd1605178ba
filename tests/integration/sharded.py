"""A policy whose layers FSDP2 shards: `sharded.py OUT`, started as each of two ranks.

Each rank writes to OUT

- `passes`: how far log-probs and gradient of one pass for a group's prompt are from those of TRL's passes;
- by the kind of an adapter: how many pushed weights differ from those of the same policy in one piece, and how many of
  its own weights the push changed.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    import support.without_vllm  # noqa: F401 - before TRL

import torch
from peft import LoraConfig, get_peft_model
from support.padded import VOCABULARY, WIDTH, apart, gradient, padded_batch, shared, trls_own
from support.pushing import CPU, pushed
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM


def policy(vocabulary):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ))  # fmt: skip


def highest(number):
    found = torch.tensor([number])
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return int(found)


def shard(model, layers, mesh):
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)


def distances(mesh):
    model = policy(VOCABULARY)
    prompts = shared(model, highest=highest)
    shard(model, model.model.layers, mesh)
    batch = padded_batch(seed=distributed.get_rank())

    def passed(log_probs):
        model.zero_grad()
        logps, entropies, _ = log_probs(model, *batch, WIDTH, compute_entropy=True)
        return logps.detach(), gradient(model, logps, entropies, zero=False)

    theirs = passed(trls_own)
    ours = passed(lambda *args, **given: prompts.log_probs(trls_own, *args, **given))
    assert prompts.is_on
    assert prompts.is_checked
    return [float(apart(one, other)) for one, other in zip(ours, theirs, strict=True)]


def adapted(**lora):
    base = policy(64).to(torch.bfloat16)
    config = LoraConfig(target_modules="all-linear", **lora)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)  # FSDP2 wants one number format in a layer
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 50
    return model


def local(model):
    return {name: weight.to_local().clone() for name, weight in model.named_parameters()}


def unequal(one, other):
    assert set(one) == set(other)
    return sum(not torch.equal(one[name], other[name]) for name in one)


def main(out):
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    found = {"passes": distances(mesh)}
    for kind, lora in {"lora": {}, "dora": {"use_dora": True}}.items():
        model = adapted(**lora)
        whole = pushed(model)
        shard(model, model.base_model.model.model.layers, mesh)
        before = local(model)
        found[kind] = unequal(pushed(model, CPU, fsdp_version=2), whole), unequal(local(model), before)
    Path(out, f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()  # the first to end may take the other with it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
