"""The row that stands for a padded batch."""

import itertools
import random

import pytest
import torch
from support.padded import COMPLETIONS, PROMPTS, WIDTH, padded_batch

from salesrl_trl.shared_prompts.row_layout import IGNORED, Row, groups_of, layout_of
from salesrl_trl.shared_prompts.shared_passes import _split_off, packed

CPU = torch.device("cpu")


def drawn(seed):
    """A batch of up to eight rows, of prompts with 1 to 9 tokens."""
    draw = random.Random(seed)
    prompts = [draw.choice((1, 2, 5, 9)) for _ in range(draw.randrange(1, 9))]
    return padded_batch(prompts, [draw.randrange(0, WIDTH + 1) for _ in prompts], seed)


def seen(layout):
    """By place in the row, the places that its token sees."""
    ends = [0]
    for length in layout.prefixes:
        ends.append(ends[-1] + length)
    places = {place: range(start, place + 1) for start, end in itertools.pairwise(ends) for place in range(start, end)}
    start = ends[-1]
    for group, lengths in enumerate(layout.segments):
        prefix = range(ends[group], ends[group + 1]) if group < len(layout.prefixes) else range(0)
        for length in lengths:
            places |= {place: [*prefix, *range(start, place + 1)] for place in range(start, start + length)}
            start += length
    return places


@pytest.mark.parametrize("with_last", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_each_token_to_predict_sees_its_own_sequence_at_its_positions_and_nothing_else(seed, with_last):
    ids, mask = drawn(seed)
    layout = layout_of(groups_of(ids, mask, WIDTH), ids.size(1), WIDTH, CPU, with_last=with_last)
    row = Row.of(layout, ids, mask, WIDTH)
    visible, first, predicted = seen(layout), ids.size(1) - WIDTH, set()
    for place in (row.labels[0] != IGNORED).nonzero().flatten().tolist():
        sample, column = divmod(row.places[place].item(), WIDTH)
        predicted.add((sample, column))
        there = mask[sample, : first + column].bool()
        assert row.labels[0, place] == ids[sample, first + column]
        assert row.input_ids[0, visible[place]].tolist() == ids[sample, : first + column][there].tolist()
        assert row.position_ids[0, visible[place]].tolist() == there.nonzero().flatten().tolist()
    assert predicted == set(map(tuple, mask[:, first:].nonzero().tolist()))
    values = torch.where(row.labels == IGNORED, 0.0, row.places + 1.0)
    spread = row.spread(values, len(ids), WIDTH)
    assert torch.equal(spread, torch.arange(1.0, spread.numel() + 1).view_as(spread) * mask[:, first:])
    if with_last:
        assert layout.weights.sum() == mask.sum()  # each token of the batch is counted
    else:
        assert len(layout.source) <= max(mask.sum(), 1)


def test_a_batch_without_a_token_to_predict_is_a_row_of_one():
    ids, mask = padded_batch(completions=[0] * len(PROMPTS))
    layout = layout_of(groups_of(ids, mask, WIDTH), ids.size(1), WIDTH, CPU)
    assert len(layout.source) == 1
    assert Row.of(layout, ids, mask, WIDTH).labels.tolist() == [[IGNORED]]


@pytest.mark.parametrize(("row", "column"), [(0, 13), (0, 8), (3, 0)])
def test_a_batch_that_is_padded_in_another_way_is_none(row, column):
    """A hole in a completion, one in a prompt, a prompt with padding behind it."""
    ids, mask = padded_batch()
    mask[row, column] = 0
    mask[3, 0] = 0 if column == 0 else mask[3, 0]
    mask[3, 1] = 1
    if column == 0:
        mask[3, 5] = 0
    assert groups_of(ids, mask, WIDTH) is None
    ids, mask = padded_batch()
    mask[0, :12] = 0  # an empty prompt
    assert groups_of(ids, mask, WIDTH) is None


@pytest.mark.parametrize("most", [1, 20, 40, 1000])
def test_packs_hold_every_completion_once_within_their_tokens(most):
    groups = groups_of(*padded_batch(), WIDTH)
    packs = packed(groups, most)
    assert [group for pack in packs for group in pack] == groups
    assert all(len(pack) == 1 or sum(group.tokens for group in pack) <= most for pack in packs)
    while len(packs) < len(PROMPTS):  # as many as another rank may have
        packs.append(_split_off(packs))
        held = sorted(pair for pack in packs for g in pack for pair in zip(g.rows, g.completions, strict=True))
        assert held == list(enumerate(COMPLETIONS))
        assert all(pack for pack in packs)
