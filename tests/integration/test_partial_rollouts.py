"""`partial_rollouts` on real vLLM: what is left of a batch goes on beside the next one, and what trains is what was
sampled."""

import json
import sys
from pathlib import Path

import pytest
import torch
from support.forked import done_on_vllm
from support.keyed import make_tiny_policy
from support.scripted import settings

STEPS, BATCH, LONGEST = 5, 8, 40


@pytest.mark.slow
def test_long_completions_go_on_beside_the_next_batch_and_the_cache_is_of_their_own_weights(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy", hidden_size=64, max_position_embeddings=1024)
    done = done_on_vllm(__file__, policy, tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    # 1. training goes on with as many unfinished completions as the share allows, and fewer at the end
    assert max(told["left"]) == BATCH // 2 and told["left"][-1] == 0
    # 2. an evaluation in between gets its own completions, no others: four before training, four after three steps
    assert told["evaluated"] == 2 * 4
    # 3. each completion trains as vLLM sampled it, once
    assert len(told["trained"]) == STEPS * BATCH
    assert sorted(told["trained"]) == sorted(told["sampled"])
    # 4. without a push inside, log-probs are those of the weights then, though long prompts come again in each step
    whole = [each for each in told["differences"] if each["begun"] == each["ended"]]
    split = [each["difference"] for each in told["differences"] if each["begun"] != each["ended"]]
    assert len(whole) >= STEPS and max(each["difference"] for each in whole) < 0.02
    # 5. with one, they are those of the weights at its beginning only up to there
    assert split and max(split) > 0.1
    assert "blocks are not freed" not in done.stderr + done.stdout
    assert "up to 50% of a batch unfinished" in done.stderr + done.stdout


def main(policy, out):
    from datasets import Dataset

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion

    left, sampled, trained, weights, spans, of_training = [], [], [], [], {}, {}

    @per_completion
    async def length(completion):
        return float(len(completion) % 7)

    args = SalesGRPOConfig(**settings(
        out / "run", beta=0.0, max_steps=STEPS, per_device_train_batch_size=BATCH, num_generations=2, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=512, learning_rate=0.05,
        max_completion_length=LONGEST, rollout_lookahead=2, partial_rollouts=0.5,
        eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4, num_generations_eval=1,
        vllm_importance_sampling_mode="token_truncate",
    ))  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {place % 4}? " * 40}]} for place in range(16)]
    evaluated = []

    class Kept(SalesGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            own = [
                [int(token) for token, one in zip(ids, mask, strict=True) if one]
                for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
            ]
            (trained if self.model.training else evaluated).extend(own)
            if self.model.training:
                left.append(len(self.vllm_generation.loop.under_way))
            return output

    trainer = Kept(str(policy), [length], args, Dataset.from_list(rows), Dataset.from_list(rows[:4]))
    generation = trainer.vllm_generation
    llm, loop = generation.llm, generation.loop
    add, step, push = llm.llm_engine.add_request, loop._step, generation.sync_weights

    def added(request_id, *args, **kwargs):
        spans[request_id] = [len(weights), None]
        of_training[request_id] = trainer.model.training
        params = args[1]
        params.max_tokens = LONGEST * (len(spans) % BATCH + 1) // BATCH
        params.ignore_eos = True
        return add(request_id, *args, **kwargs)

    def stepped():
        outputs = step()
        for output in outputs:
            if output.finished:
                spans[output.request_id][1] = len(weights)
                sampled.append(output)
        return outputs

    def pushed():
        with torch.no_grad():  # as a training of many steps
            for parameter in trainer.model.parameters():
                parameter.mul_(1.2)
        weights.append({name: value.detach().clone() for name, value in trainer.model.state_dict().items()})
        push()

    llm.llm_engine.add_request, loop._step, generation.sync_weights = added, stepped, pushed
    trainer.train()
    model, differences = trainer.model.eval(), []
    for output in sampled:
        begun, ended = spans[output.request_id]
        model.load_state_dict(weights[begun - 1])
        ids, own = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids + own])).logits[0, len(ids) - 1 : -1]
        ours = logits.log_softmax(-1)[torch.arange(len(own)), torch.tensor(own)]
        given = zip(output.outputs[0].logprobs, own, strict=True)
        theirs = torch.tensor([place[token].logprob for place, token in given])
        differences.append({"begun": begun, "ended": ended, "difference": float((ours - theirs).abs().max())})
    ids = [list(output.outputs[0].token_ids) for output in sampled if of_training[output.request_id]]
    told = {
        "left": left, "trained": trained, "sampled": ids, "differences": differences, "evaluated": len(evaluated),
    }  # fmt: skip
    (out / "told.json").write_text(json.dumps(told))
    trainer.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
