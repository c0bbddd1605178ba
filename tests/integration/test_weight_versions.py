"""`partial_rollouts` on a vLLM that says which weights sampled a token: the ages that are logged, and what of unknown
weights does not train."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.forked import done_on_vllm
from support.keyed import make_tiny_policy
from support.scripted import settings

STEPS, BATCH, LONGEST = 6, 8, 40
FOREIGN = 3  # the step whose push is labelled as if by somebody else


@pytest.mark.slow
def test_ages_are_those_of_tokens_and_what_unknown_weights_sampled_is_excluded(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy", hidden_size=64, max_position_embeddings=1024)
    done_on_vllm(__file__, policy, tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    split = unknown = 0
    for update, (entry, trained) in enumerate(zip(told["log"], told["trained"], strict=True)):
        ages = []
        for labels, mask in trained:
            assert len(labels) == len(mask) == LONGEST
            own = [label for label in labels if label]  # one for each sampled token
            split += len({*own}) > 1
            if "default" in own:  # nothing of it trains
                unknown += 1
                assert not any(mask)
            else:
                assert sum(mask) == len(own)
                steps = [int(label.rpartition("-")[2]) for label in own]
                ages.append((update - sum(steps) / len(steps), update - min(steps)))
        if not ages:  # all are excluded
            assert entry.get("rollout/staleness") is None
            continue
        assert entry["rollout/staleness"] == pytest.approx(sum(mean for mean, _ in ages) / len(ages), abs=1e-5)
        assert entry["rollout/staleness_max"] == max(oldest for _, oldest in ages)
    assert split and 0 < unknown < STEPS * BATCH  # both happened
    assert told["excluded"] == {"failures/reason/unknown_weights": unknown}


def main(policy, out):
    from datasets import Dataset
    from support.labelling import label_outputs

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion

    label_outputs()
    trained, labels_of = [], {}

    @per_completion
    async def length(completion):
        return float(len(completion) % 7)

    args = SalesGRPOConfig(**settings(
        out / "run", beta=0.0, max_steps=STEPS, per_device_train_batch_size=BATCH, num_generations=2, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=512, learning_rate=0.05,
        max_completion_length=LONGEST, rollout_lookahead=2, partial_rollouts=0.5,
        vllm_importance_sampling_mode="token_truncate",
    ))  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {place % 4}? " * 4}]} for place in range(16)]

    class Kept(SalesGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            if len(trained) < STEPS:
                trained.append([
                    (labels_of[tuple(ids.tolist())], mask.tolist())
                    for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
                ])  # fmt: skip
            return output

    trainer = Kept(str(policy), [length], args, Dataset.from_list(rows))
    generation = trainer.vllm_generation
    engine, loop, pad = generation.llm.llm_engine, generation.loop, trainer._tokenizer.pad_token_id
    add, step, push, number = engine.add_request, loop._step, generation.sync_weights, iter(range(1000))

    def added(request_id, prompt, params, *args, **kwargs):
        params.max_tokens = LONGEST * (next(number) % BATCH + 1) // BATCH
        params.ignore_eos = True
        return add(request_id, prompt, params, *args, **kwargs)

    def stepped():
        outputs = step()
        for output in outputs:
            made = output.outputs[0]
            labels = [span.version for span in made.weight_versions for _ in range(span.start, span.end)]
            ids = [*made.token_ids, *[pad] * (LONGEST - len(labels))]
            labels_of[tuple(ids)] = [*labels, *[""] * (LONGEST - len(labels))]
        return outputs

    def pushed():
        push()
        if trainer.state.global_step == FOREIGN:
            generation.labels._pending = "default"
            engine.set_weight_version("default")

    engine.add_request, loop._step, generation.sync_weights = added, stepped, pushed
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    excluded = Counter()
    for entry in trainer.state.log_history:
        excluded.update({name: count for name, count in entry.items() if name.startswith("failures/reason/")})
    (out / "told.json").write_text(json.dumps({"trained": trained, "log": log, "excluded": excluded}))
    trainer.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
