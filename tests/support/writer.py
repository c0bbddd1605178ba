"""A policy that writes valid actions without having been trained."""

import itertools
import re

import torch

from salesrl_trl.demo import policy

WORDS = 8
"""Words of a field, none of which is in another field. A field has one of them or more."""
STRENGTH = 1.4
"""A head's row on the token before it. What may follow a token then follows it 97 times in 100."""
QUIET = 0.3
"""Of the layers: what a token is counts for more than what came before it, and all weights have gradients."""


def make_writer(path):
    """The small policy with other weights: of what may follow a token in an action, each is as likely. Most of its
    samples are valid, and no two need to be equal. Its shape and its tokenizer are those of a warm start."""
    torch.manual_seed(0)
    tokenizer = policy.build_tokenizer()
    model = policy.build_model(tokenizer)
    vocabulary = tokenizer.get_vocab()
    words = [token for text, token in sorted(vocabulary.items()) if re.fullmatch("Ġ[a-z]{4,}", text)]
    assert len(words) >= 3 * WORDS
    (before,) = tokenizer("\n")["input_ids"]  # the end of a prompt
    pieces = [vocabulary[piece] for piece in policy._PIECES]
    follows = {before: pieces[:1], pieces[-1]: [tokenizer.eos_token_id]}
    for place, (piece, end) in enumerate(itertools.pairwise(pieces)):
        own = words[place :: len(words) // WORDS][:WORDS]
        follows |= {piece: own} | {word: [*own[:3], end] for word in own}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= QUIET
            layer.mlp.down_proj.weight *= QUIET
        for token, each in follows.items():
            embedding = model.get_input_embeddings().weight[token]
            model.lm_head.weight[each] += STRENGTH * embedding / embedding.norm()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
