"""A group's prompt once through the model on a GPU, in 16 bits: by flash attention, and as close to float32 as TRL."""

import pytest
import torch
from support.padded import VOCABULARY, WIDTH, apart, gradient, padded_batch, shared, trls_own
from transformers import Qwen2Config, Qwen2ForCausalLM

from salesrl_trl.shared_prompts import shared_attention

pytestmark = pytest.mark.gpu

SEEDS = range(8)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_log_probs_and_gradient_are_as_close_to_float32_as_trls(kind, monkeypatch):
    torch.manual_seed(0)
    fields = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **fields)).cuda().to(kind)
    prompts, used = shared(model), []
    forward = shared_attention.forward
    monkeypatch.setattr(shared_attention, "forward", lambda *args: (used.append(1), forward(*args))[1])

    def found(way, batch, precision):
        model.to(precision)
        logps, entropies, _ = way(model, *batch, WIDTH, compute_entropy=True)
        grads = gradient(model, logps.float(), entropies.float())
        return logps.detach().float(), grads.float()

    ours, theirs = [], []
    for seed in SEEDS:
        batch = [each.cuda() for each in padded_batch(seed=seed)]
        exact = found(trls_own, batch, torch.float32)
        stock = found(trls_own, batch, kind)
        mine = found(lambda *args, **given: prompts.log_probs(trls_own, *args, **given), batch, kind)
        theirs.append([apart(*pair) for pair in zip(stock, exact, strict=True)])
        ours.append([apart(*pair) for pair in zip(mine, exact, strict=True)])
    assert prompts.is_on
    assert used
    for mine, stock in zip(torch.tensor(ours).mean(dim=0), torch.tensor(theirs).mean(dim=0), strict=True):
        assert mine < 1.2 * stock
