"""The push of a policy with an adapter whose layers FSDP2 shards: `sharded_push.py OUT`, started as each of two ranks.

Each rank writes to OUT, by the kind of adapter, how many pushed weights differ from those of the same policy in one
piece, and how many of its own weights the push changed.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from support.pushing import CPU, pushed
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM


def adapted(**lora):
    torch.manual_seed(0)
    policy = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )).to(torch.bfloat16)  # fmt: skip
    model = get_peft_model(
        policy, LoraConfig(target_modules="all-linear", **lora), autocast_adapter_dtype=False
    )  # FSDP2 wants one number format in a layer
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
    found = {}
    for kind, lora in {"lora": {}, "dora": {"use_dora": True}}.items():
        model = adapted(**lora)
        whole = pushed(model)
        for part in (*model.base_model.model.model.layers, model):
            fully_shard(part, mesh=mesh)
        before = local(model)
        found[kind] = unequal(pushed(model, CPU, fsdp_version=2), whole), unequal(local(model), before)
    Path(out, f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()  # the first to end may take the other with it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
