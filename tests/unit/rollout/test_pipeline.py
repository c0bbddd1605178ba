"""Which micro-batches are ready while rewards are out, and what the correction for the sampler did."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.rollout.pipeline import Parts, correction_sums, why_not_divisible, why_not_streamed
from salesrl_trl.rollout.schedule import parts

WANTED = 0.5


def parts_of(size, micro_batch, group):
    return Parts(object(), parts(size, micro_batch, group), micro_batch)


def batch_of(size, name="first"):
    """What TRL makes of a generation batch, told apart by `name`."""
    return {
        "completion_ids": torch.arange(size * 3).view(size, 3),
        "advantages": torch.arange(size) + (0 if name == "first" else 100),
        "num_items_in_batch": torch.tensor(7),
        "name": name,
    }


def settled(*ranks):
    """Shape (world size, B): `settled("110", "111")`."""
    return torch.tensor([[mark == "1" for mark in rank] for rank in ranks])


def taken(waiting):
    """Rows of the micro-batches that are ready, in order."""
    found = []
    while waiting.has_next:
        found.append(waiting.next()["advantages"].tolist())
    return found


def test_a_part_is_ready_when_all_of_it_is_settled():
    waiting = parts_of(8, micro_batch=2, group=4)
    waiting.see(settled("11101111"), 0, 0.9, WANTED)
    waiting.release(batch_of(8))
    assert taken(waiting) == [[4, 5], [6, 7]]
    assert waiting.remaining == [range(4)]
    assert not waiting.complete
    assert not waiting.is_empty


def test_what_is_not_released_is_not_there():
    waiting = parts_of(4, micro_batch=2, group=2)
    assert not waiting.has_next
    waiting.see(settled("1100"), 0, 0.9, WANTED)
    assert not waiting.has_next
    assert not waiting.is_empty


def test_a_released_part_does_not_come_again_with_later_advantages():
    waiting = parts_of(4, micro_batch=2, group=2)
    waiting.see(settled("1100"), 0, 0.9, WANTED)
    waiting.release(batch_of(4))
    waiting.see(settled("1111"), 0, 1.0, WANTED)
    waiting.release(batch_of(4, "second"))
    assert taken(waiting) == [[0, 1], [102, 103]]
    assert waiting.is_empty


def test_a_part_is_released_by_the_look_that_found_it_ready_alone():
    waiting = parts_of(4, micro_batch=2, group=2)
    waiting.see(settled("1100"), 0, 0.9, WANTED)
    waiting.release(batch_of(4))
    waiting.release(batch_of(4, "second"))
    assert taken(waiting) == [[0, 1]]


def test_nothing_is_ready_before_so_much_is_scored_that_the_batch_can_not_be_skipped():
    waiting = parts_of(4, micro_batch=1, group=1)
    waiting.see(settled("1100"), 0, 0.25, WANTED)  # one of them could not be scored
    waiting.release(batch_of(4))
    assert taken(waiting) == []
    assert waiting.remaining == parts(4, 1, 1)
    waiting.see(settled("1110"), 0, 0.5, WANTED)
    waiting.release(batch_of(4))
    assert taken(waiting) == [[0], [1], [2]]


def test_when_all_is_settled_all_is_released_however_little_was_scored():
    waiting = parts_of(4, micro_batch=2, group=2)
    waiting.see(settled("1111"), 0, 0.25, WANTED)
    assert waiting.complete
    waiting.release(batch_of(4))
    assert taken(waiting) == [[0, 1], [2, 3]]
    assert waiting.is_empty


def test_with_several_ranks_what_is_settled_on_a_rank_is_ready_there():
    one, other = parts_of(6, micro_batch=2, group=2), parts_of(6, micro_batch=2, group=2)
    for rows, first, second in (
        (("111100", "110011"), [[0, 1], [2, 3]], [[0, 1], [4, 5]]),
        (("111111", "110011"), [[4, 5]], []),  # complete on one rank, and not on the other
        (("111111", "111111"), [], [[2, 3]]),
    ):
        for rank, (waiting, wanted) in enumerate(((one, first), (other, second))):
            waiting.see(settled(*rows), rank, 0.9, WANTED)
            waiting.release(batch_of(6))
            assert taken(waiting) == wanted
            assert waiting.complete == ("0" not in "".join(rows))
    assert one.is_empty
    assert other.is_empty


def waited_for(rows, scored_fraction):
    """Of each rank: the parts of which it waits for one."""
    found = []
    for rank in range(len(rows)):
        waiting = parts_of(len(rows[0]), micro_batch=2, group=2)
        waiting.see(settled(*rows), rank, scored_fraction, WANTED)
        found.append([part.start // 2 for part in waiting.out])
    return found


def test_a_rank_waits_for_groups_of_its_own():
    assert waited_for(("0011", "1100"), 0.5) == [[0], [1]]
    assert waited_for(("00111111", "11000000"), 0.6) == [[0], [1, 2, 3]]


def test_while_too_little_is_scored_nobody_waits_for_the_last_group_of_the_rank_that_is_ahead():
    assert waited_for(("00111111", "00000000"), 0.375) == [[], [0, 1, 2, 3]]
    assert waited_for(("11111111", "00000000", "00000011"), 0.4) == [[], [0, 1, 2, 3], []]


def test_while_too_little_is_scored_some_rank_waits():
    assert waited_for(("0011", "0011"), 0.4) == [[0], [0]]
    assert waited_for(("1100",), 0.25) == [[1]]  # one of two could not be scored


def test_a_micro_batch_has_the_rows_of_every_tensor_and_scalars_as_they_are():
    waiting = parts_of(4, micro_batch=2, group=2)
    waiting.see(settled("0011"), 0, 0.9, WANTED)
    output = batch_of(4)
    waiting.release(output)
    micro_batch = waiting.next()
    assert micro_batch["completion_ids"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert micro_batch["advantages"].tolist() == [2, 3]
    assert micro_batch["num_items_in_batch"] is output["num_items_in_batch"]
    assert micro_batch["name"] == "first"


def test_it_is_empty_when_the_last_micro_batch_is_taken():
    waiting = parts_of(4, micro_batch=2, group=4)
    waiting.see(settled("1111"), 0, 1.0, WANTED)
    waiting.release(batch_of(4))
    assert waiting.remaining == []
    assert not waiting.is_empty
    waiting.next()
    assert not waiting.is_empty
    waiting.next()
    assert waiting.is_empty
    assert not waiting.has_next


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_whatever_the_order_of_rewards_every_row_comes_once_with_its_whole_group(
    micro_batch, group, count, ranks, random
):
    size = math.lcm(micro_batch, group) * count
    waiting = parts_of(size, micro_batch, group)
    marks = torch.zeros(ranks, size, dtype=torch.bool)
    order = [(rank, place) for rank in range(ranks) for place in range(size)]
    random.shuffle(order)
    rows = []
    for done, (rank, place) in enumerate(order, start=1):
        marks[rank, place] = True
        if random.random() < 0.5 or done == len(order):
            waiting.see(marks, 0, marks.float().mean().item(), WANTED)
            waiting.release(batch_of(size))
            for each in taken(waiting):
                assert len(each) == micro_batch
                groups = {row // group for row in each}
                assert all(marks[0, each_group * group : (each_group + 1) * group].all() for each_group in groups)
                assert done >= WANTED * len(order)
                rows += each
    assert sorted(rows) == list(range(size))
    assert waiting.is_empty


# The correction for the sampler's distribution


def corrected(ratio, mode, low, high):
    """What TRL 1.16 makes of importance ratios."""
    if mode.endswith("_truncate"):
        return ratio if low is None and high is None else ratio.clamp(min=low, max=high)
    beyond = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
    return ratio.masked_fill(beyond, 0.0)


def counted(raw, mask, mode, low, high):
    """What is left out or bounded, by a loop over ratios before their correction."""
    left_out = bounded = count = 0
    for ratios, marks in zip(raw.tolist(), mask.tolist(), strict=True):
        if mode.startswith("sequence"):
            marks = [int(any(marks))]
        for ratio, mark in zip(ratios, marks, strict=True):
            if mark:
                beyond = (low is not None and ratio < low) or (high is not None and ratio > high)
                count += 1
                left_out += beyond and mode.endswith("_mask")
                bounded += beyond and mode.endswith("_truncate")
    return [left_out, bounded, count]


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (None, 3.0), (0.7, None), (None, None), (0.1, 1.1)])
def test_the_sums_are_those_of_a_loop_over_ratios(mode, low, high):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        mask = (torch.rand(6, 5, generator=generator) < 0.6).long()
        mask[0] = 0  # a completion of which nothing is trained on
        raw = torch.randn(6, 1 if mode.startswith("sequence") else 5, generator=generator).exp()
        sums = correction_sums(corrected(raw, mode, low, high), mask, mode, low, high)
        assert sums.dtype == torch.float64
        assert sums.tolist() == counted(raw, mask, mode, low, high)


def test_a_ratio_on_a_bound_counts_as_bounded_in_the_numbers_own_format():
    for dtype in (torch.float32, torch.bfloat16):
        ratio = torch.tensor([[3.0, 1.0, 1.0]], dtype=dtype).clamp(min=1.1, max=2.3)
        sums = correction_sums(ratio, torch.ones(1, 3), "token_truncate", 1.1, 2.3)
        assert sums.tolist() == [0, 3, 3], dtype


def test_a_ratio_that_is_nothing_by_itself_is_left_out_by_a_mask_alone():
    ratio, mask = torch.tensor([[-1000.0, 0.0]]).exp(), torch.ones(1, 2)
    assert correction_sums(ratio, mask, "token_mask", None, 3.0).tolist() == [1, 0, 2]
    assert correction_sums(ratio, mask, "token_truncate", None, 3.0).tolist() == [0, 0, 2]


def test_padding_counts_for_nothing():
    ratio, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0, 0, 1]])
    assert correction_sums(ratio, mask, "token_mask", None, 3.0).tolist() == [0, 0, 1]
    assert correction_sums(ratio, mask, "token_truncate", 0.5, 3.0).tolist() == [0, 0, 1]


def test_what_a_skipped_batch_leaves_of_a_mask_counts_for_nothing():
    mask = torch.zeros(2, 3, dtype=torch.long)
    for mode, columns in (("token_mask", 3), ("sequence_truncate", 1)):
        assert correction_sums(torch.zeros(2, columns), mask, mode, 0.5, 2.0).tolist() == [0, 0, 0]


# What is off says why


@pytest.mark.parametrize(
    ("given", "hindrance"),
    [
        ({}, None),
        ({"accelerator": SimpleNamespace(num_processes=8)}, None),
        ({"use_vllm": False}, "transformers generates"),
        ({"rollout_func": print}, "`rollout_func` generates"),
        (
            {"_tokenizer": SimpleNamespace(response_template={"role": "assistant"})},
            "the tokenizer's response template",
        ),
        ({"_tokenizer": SimpleNamespace(response_schema={"type": "object"})}, "the tokenizer's response template"),
    ],
)
def test_what_keeps_rewards_waiting_for_a_whole_batch_is_told(given, hindrance):
    trainer = {"use_vllm": True, "rollout_func": None, "_tokenizer": SimpleNamespace(), **given}
    told = why_not_streamed(SimpleNamespace(**trainer))
    assert told is None if hindrance is None else told.startswith(hindrance)


@pytest.mark.parametrize(
    ("given", "hindrance"),
    [
        ({}, None),
        ({"steps_per_generation": 8}, "an update has a part"),
        ({"per_device_train_batch_size": 2, "num_generations": 16}, "a micro-batch and a group share no border"),
        ({"num_iterations": 2}, "`num_iterations`"),
        ({"loss_type": "bnpo"}, "`loss_type` bnpo"),
        ({"scale_rewards": "batch"}, "`scale_rewards: batch`"),
        ({"hybrid_reference_weight": 0.5}, "`hybrid_reference_weight`"),
        ({"hybrid_reference_weight": 0.5, "scale_rewards": "none"}, None),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "`multi_objective_aggregation`"),
        ({"top_entropy_quantile": 0.2}, "`top_entropy_quantile`"),
        ({"_entropy_bonus_enabled": True}, "the entropy bonus"),
        ({"aux_loss_enabled": True}, "the router's"),
    ],
)
def test_what_keeps_scored_groups_from_being_trained_on_first_is_told(given, hindrance):
    # 4 micro-batches of 4 completions, groups of 4: a border after each
    trainer = {
        "num_iterations": 1, "num_generations": 4, "loss_type": "dapo", "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0,
        "_entropy_bonus_enabled": False, "aux_loss_enabled": False, "gradient_accumulation_steps": 4,
        "steps_per_generation": 4, "per_device_train_batch_size": 4, "hybrid_reference_weight": 0.0, **given,
    }  # fmt: skip
    told = why_not_divisible(SimpleNamespace(args=SimpleNamespace(**trainer), **trainer))
    assert told is None if hindrance is None else told.startswith(hindrance)
