"""One pass for a group's prompt through a model whose layers FSDP2 shards: `sharded_passes.py OUT`, started as each of
two ranks.

Each rank writes to OUT how far log-probs and gradient are from those of TRL's passes through the same model.
"""

import json
import sys
from pathlib import Path

import torch
from support.padded import VOCABULARY, WIDTH, apart, gradient, padded_batch, shared, trls_own
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM


def highest(number):
    found = torch.tensor([number])
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return int(found)


def main(out):
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ))  # fmt: skip
    prompts = shared(model, highest=highest)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    batch = padded_batch(seed=distributed.get_rank())

    def passed(log_probs):
        model.zero_grad()
        logps, entropies, _ = log_probs(model, *batch, WIDTH, compute_entropy=True)
        return logps.detach(), gradient(model, logps, entropies, zero=False)

    theirs = passed(trls_own)
    ours = passed(lambda *args, **given: prompts.log_probs(trls_own, *args, **given))
    assert prompts.is_on
    assert prompts.is_checked
    far = [float(apart(one, other)) for one, other in zip(ours, theirs, strict=True)]
    Path(out, f"rank{distributed.get_rank()}.json").write_text(json.dumps(far))
    distributed.barrier()  # the first to end may take the other with it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
