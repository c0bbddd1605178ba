"""Rows with several sequences of an episode: their log-probs and gradient are those of each sequence alone."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from salesrl_trl.rollout.several_sequences import Apart, log_probs, sequences_of

PROMPTS = [[3, 4, 5], [6]]
# by row: what follows its prompt, then further prompts each with what follows it
ROWS = [([7, 8], [([9, 1, 2, 3], [4, 5, 6]), ([7], [8])]), ([2, 3, 4, 5], [])]
SEQUENCES = torch.tensor([[[0, 2], [4, 3], [1, 1]], [[0, 4], [0, 0], [0, 0]]])


def padded():
    """TRL's batch: prompts padded on the left, what follows them on the right."""
    flat = [own + [token for part in more for piece in part for token in piece] for own, more in ROWS]
    before, width = max(map(len, PROMPTS)), max(map(len, flat))
    ids = [[0] * (before - len(p)) + p + c + [0] * (width - len(c)) for p, c in zip(PROMPTS, flat, strict=True)]
    mask = [
        [0] * (before - len(p)) + [1] * (len(p) + len(c)) + [0] * (width - len(c))
        for p, c in zip(PROMPTS, flat, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask), width


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).double()


def upstream(model, input_ids, attention_mask, width, batch_size=None, **_):
    """As TRL's: log-probs of the last `width` columns, and twice them in place of entropies."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    parts = []
    for ids, mask, place in zip(
        *(each.split(batch_size or len(input_ids)) for each in (input_ids, attention_mask, positions)), strict=True
    ):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=place).logits[:, :-1]
        parts.append(logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, -width:, 0])
    logps = torch.cat(parts)
    return logps, 2 * logps, None


def alone(model, prompt, tokens):
    """A sequence's log-probs by hand: no batch, no padding, no mask."""
    ids = torch.tensor([prompt + tokens])
    logits = model(input_ids=ids).logits[0].log_softmax(-1)
    return [logits[len(prompt) + place - 1, token] for place, token in enumerate(tokens)]


def by_hand(model):
    """Shape (2, 11): the sequences' log-probs in their columns, 0 in those of further prompts and of padding."""
    table = []
    for prompt, (own, more) in zip(PROMPTS, ROWS, strict=True):
        row = alone(model, prompt, own)
        for further, tokens in more:
            row += [torch.zeros((), dtype=torch.float64)] * len(further) + alone(model, further, tokens)
        table.append(torch.stack(row + [torch.zeros((), dtype=torch.float64)] * (11 - len(row))))
    return torch.stack(table)


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_log_probs_and_gradient_are_those_of_each_sequence_alone(model, batch_size):
    ids, mask, width = padded()
    assert width == 2 + 4 + 3 + 1 + 1
    logps, entropies, _ = log_probs(upstream, SEQUENCES, model, ids, mask, width, batch_size)
    expected = by_hand(model)
    torch.testing.assert_close(logps, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropies, 2 * expected, rtol=1e-12, atol=1e-12)
    # TRL's dapo: the sum over tokens of advantage times ratio, by the tokens of the batch, 6 and 4; the ratio's
    # gradient is the log-prob's. Each sequence of a row has the row's advantage, and each token counts once.
    advantages = torch.tensor([[1.5], [-0.5]], dtype=torch.float64)
    gradients = []
    for each in (logps, expected):
        model.zero_grad()
        ((each - each.detach()).exp() * advantages * (each != 0)).sum().div(10).backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_a_row_of_several_sequences_read_as_one_would_be_another(model):
    ids, mask, width = padded()
    apart = (upstream(model, ids, mask, width)[0] - by_hand(model)).abs()
    assert apart[0, :2].max() < 1e-12 and apart[1, :4].max() < 1e-12
    assert apart[0, 6:9].min() > 1e-3  # the second sequence would see the first


def test_a_masked_row_still_has_its_sequences_and_passes_are_equal_in_number():
    ids, mask, width = padded()
    mask[0, -width:] = 0  # it has failed
    apart = Apart.of(SEQUENCES, mask, width, passes=3)
    assert apart.count == 4 and len(apart.source) == 6  # a multiple of the passes
    assert [ids.reshape(-1)[row[present]].tolist() for row, present in zip(apart.source, apart.mask, strict=True)][
        :4
    ] == [[3, 4, 5, 7, 8], [9, 1, 2, 3, 4, 5, 6], [7, 8], [6, 2, 3, 4, 5]]


def test_without_a_second_sequence_there_is_no_column():
    class One:
        generated = (None,) * 5 + ({"sequences": [[[0, 2]], [[0, 4]]]},)

    assert sequences_of(One) is None and sequences_of(None) is None
