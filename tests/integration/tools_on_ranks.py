"""An environment and a tool of its own service on every rank. Started with several processes: POLICY OUT.

Rank 1 calls more often than rank 0, which calls nothing in the first step, and its service is down in the second one.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from support.scripted import settings, steps_of
from transformers import AutoTokenizer

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, Transport, per_completion, tool

STEPS, BATCH = 3, 4  # completions of each rank
transport = Transport("shelf", max_concurrency=4, attempt_timeout_s=5, max_attempts=1)


class Down(Exception):
    status_code = 503


class Basket:
    """An environment whose method asks a service."""

    def reset(self, **row):
        self.count = 0
        return "Count."

    @tool(transport=transport)
    async def put(self, number: int) -> int:
        """Puts things into the basket.

        Args:
            number: How many.

        Returns:
            How many there are.
        """
        if RANK and trainer.state.global_step == 1:
            raise Down
        self.count += number
        return self.count


@tool(transport=transport)
def price(number: int) -> int:
    """Says what things cost.

    Args:
        number: How many.

    Returns:
        The price.
    """
    return 10 * number


@per_completion
async def filled(completion, environments):
    return float(environments.count)


def texts(prompts):
    """Of each completion the next turn: a call of each tool, and then an end."""
    asks = RANK == 1 or trainer.state.global_step > 0
    for place, prompt in enumerate(prompts):
        done = prompt.count("<tool_response>")
        name = ("put", "price")[done] if asks and done < 1 + place % 2 else None
        call = {"name": name, "arguments": {"number": place + 1}}
        yield f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if name else f"Done {RANK} {place}!"


def generate(input_ids, **kwargs):
    own = texts(tokenizer.batch_decode(input_ids))
    ids = [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in own]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return torch.cat([input_ids, padded], dim=1)


if __name__ == "__main__":
    policy, out = sys.argv[1:]
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    RANK, tokenizer = int(os.environ["RANK"]), AutoTokenizer.from_pretrained(policy)
    args = SalesGRPOConfig(**settings(
        Path(out, "run"), beta=0.0, max_steps=STEPS, per_device_train_batch_size=BATCH, num_generations=BATCH,
        max_completion_length=256, ddp_backend="gloo", min_valid_reward_fraction=0.0,
    ))  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Basket {place}?"}]} for place in range(8)])
    trainer = SalesGRPOTrainer(policy, [filled], args, rows, tools=[price], environment_factory=Basket)
    trainer.model.generate = generate
    trainer.train()
    trainer.finish()
    Path(out, f"rank{RANK}.json").write_text(json.dumps(steps_of(trainer)))
