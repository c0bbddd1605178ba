"""Lengths of completions: their distributions, the same in all arms of a bench, and the floor of a step by hand."""

import json
import statistics
from types import SimpleNamespace

import pytest
from support.engines import LLM

from benchmarks.floor import MULTIPLY, READ, floor
from benchmarks.lengths import completion_tokens, decoding_steps, fix_lengths, fix_server_lengths
from benchmarks.peers.task import Plan
from benchmarks.peers.verl_arm import drawn_length
from salesrl_trl.generation.engine_loop import CompletionTasks, EngineLoop

MOST = 4096


class Params(SimpleNamespace):
    """vLLM's `SamplingParams`."""

    def clone(self):
        return Params(**vars(self))


class ByLength(LLM):
    """An engine in which a request takes as many steps as its `max_tokens`."""

    def enqueue(self, prompts, *, sampling_params, **_):
        for prompt, params in zip(prompts, sampling_params, strict=True):
            self.llm_engine.add_request(str(self.count), prompt, params)
            self.llm_engine.left[str(self.count)] = params.max_tokens
            self.count += 1

    generate = enqueue


@pytest.mark.parametrize(
    ("kind", "median", "p95", "least"), [("heavy", 600, 3000, 1), ("short", 1024 + 0.231 * MOST, MOST, 1024)]
)
def test_a_distribution_has_its_median_its_95th_percentile_and_its_limits(kind, median, p95, least):
    drawn = sorted(completion_tokens([prompt], sample, MOST, kind) for prompt in range(1000) for sample in range(8))
    assert statistics.median(drawn) == pytest.approx(median, rel=0.05)
    assert drawn[int(0.95 * len(drawn))] == pytest.approx(p95, rel=0.05)
    assert least <= drawn[0] and drawn[-1] == MOST


def test_a_sample_has_the_same_length_in_all_arms_and_keeps_it_where_it_is_left_unfinished(tmp_path, monkeypatch):
    prompts = [[5, 7], [5, 8]]
    # verl: by the number of the row and of the sample, with the token ids that were stored
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    plan = Plan(arm="verl_sync", folder=str(tmp_path), prompt_tokens=2, tokens=MOST, latencies=[], lengths="heavy")
    plan.write(tmp_path / "plan.json")
    monkeypatch.setenv("PEERS_PLAN", str(tmp_path / "plan.json"))
    expected = [drawn_length({}, row, sample)["max_tokens"] for row in (2, 3) for sample in range(4)]
    assert expected == [plan.length(row, sample) for row in range(2) for sample in range(4)]
    assert len({*expected}) > 6
    # stock TRL and Unsloth: vLLM's `generate`
    asked = [{"prompt_token_ids": ids} for ids in prompts for _ in range(4)]
    stock = ByLength()
    fix_lengths(stock, MOST, "heavy")
    stock.generate(asked, sampling_params=Params(max_tokens=MOST))
    assert [params.max_tokens for _, params in stock.llm_engine.asked] == expected
    # this package: each completion decodes as many steps, though half of them go on beside the next batch
    llm, done = ByLength(), []
    loop = EngineLoop(llm)
    fix_lengths(llm, MOST, "heavy")
    step, steps = loop._step, []
    loop._step, loop.most_unfinished = lambda: (steps.append(1), step())[1], 4
    for number in range(2):
        begun = len(steps)

        def finished(place, _, of=number, begun=begun):
            done.append((of, place, len(steps) - begun))

        batch = CompletionTasks(8, loop, finished)
        batch.begin(asked, [Params(max_tokens=MOST)] * 8)
        loop.run(batch, ahead=True)
    assert loop.under_way and {of for of, *_ in done} == {0, 1}
    loop.run(batch)
    while loop.under_way:
        loop.step()
    assert sorted(done) == [(of, place, length) for of in range(2) for place, length in enumerate(expected)]
    # a server: the number of the sample comes as a seed
    client = SimpleNamespace(generate=lambda prompts, *, max_tokens, **_: {"completion_ids": [max_tokens]})
    fix_server_lengths(client, MOST, "heavy")
    served = [client.generate([ids], generation_kwargs={"seed": sample}) for ids in prompts for sample in range(4)]
    assert [each["completion_ids"][0] for each in served] == expected


def test_decoding_steps_by_hand_and_by_what_a_step_finishes_first():
    heavy = {"most": MOST, "kind": "heavy", "batches": 40}
    # nothing may be left: as many as the longest of each batch
    longest = [
        max(completion_tokens([batch, place], sample, MOST, "heavy") for place in range(8) for sample in range(8))
        for batch in range(42)
    ]
    assert decoding_steps(0.0, 2, **heavy) == statistics.mean(longest[12:])
    own, earlier, groups = (decoding_steps(0.5, 2, finished, **heavy) for finished in ("own", "earlier", "groups"))
    assert earlier == pytest.approx(decoding_steps(0.5, 1, **heavy), rel=0.05)  # as if a lookahead were 1
    assert groups < 0.8 * own < 0.6 * earlier
    # never fewer than with all slots busy
    assert groups > 0.9 * 907 * 64 / 96


def test_the_floor_of_a_step_by_hand():
    config = {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 16, "vocab_size": 100,
    }  # fmt: skip
    # a layer: queries and output 2 x 8 x 8, keys and values 2 x 8 x 4, three matrices of 8 x 16
    body, head = 2 * (128 + 64 + 384), 800
    waits = floor(config, [[3, 5], [2, 2]], 10, group=2)
    assert waits.weights == pytest.approx((5 + 2) / 2 * 2 * (body + head) / READ)
    # pairs: 10 x 12 + (9 + 25 + 4 + 4) / 2 = 141; a token has two layers' keys and values of 4 numbers, 2 bytes each
    assert waits.cache == pytest.approx(141 / 2 * 32 / READ)
    prompts = 2 * body * 20 + 4 * 8 * 2 * 20 * 10 / 2
    assert waits.prefill == pytest.approx(prompts / 2 / MULTIPLY)
    forward = prompts + 2 * (body + head) * 12 + 4 * 8 * 2 * 141
    assert waits.passes == pytest.approx(3 * forward / 2 / MULTIPLY)  # forward twice, and backward without weights
    assert waits.step == pytest.approx(sum(waits))
    ahead = floor(config, [[3, 5], [2, 2]], 10, group=2, slots=3, full=True, checkpointing=False)
    assert ahead.weights == pytest.approx(12 / 3 / 2 * 2 * (body + head) / READ)
    assert (ahead.cache, ahead.passes) == pytest.approx((waits.cache, waits.passes))  # 1 + 2 passes in place of 2 + 1
