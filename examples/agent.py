"""An agent with two tools: your code runs the loop, and its model is the policy in training. Needs the extra `agents`.

python examples/agent.py                      # a GPU: MODEL=Qwen/Qwen3-0.6B USE_VLLM=1
"""

import json
import os

import openai
from datasets import Dataset

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_episode

PRICES = {"desk lamp": 39, "office chair": 189, "standing desk": 420, "monitor arm": 75}
MOST_TURNS = 4


def price(article: str) -> str:
    return f"{PRICES[article]} euros" if article in PRICES else "Unknown article."


def discount(price: float, percent: float) -> str:
    return f"{price * (100 - percent) / 100:.2f} euros"


def function(name, description, **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


FUNCTIONS = {"price": price, "discount": discount}
TOOLS = [
    function("price", "Returns an article's price.", article="string"),
    function("discount", "Computes a discounted price.", price="number", percent="number"),
]


def run_tool(name, arguments):
    """The result of a call, or the error as a text: the policy's mistakes are the policy's to see."""
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


@per_episode
async def episode(client, row):
    messages = row["prompt"]
    for _ in range(MOST_TURNS):
        try:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return 0.0  # no room for another turn: the policy wrote too much
        message = answer.choices[0].message
        messages = [*messages, message.model_dump(exclude_none=True)]
        if not message.tool_calls:
            return float(row["answer"] in (message.content or ""))
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


rows = [
    {
        "prompt": [{"role": "user", "content": f"What does the {name} cost with {percent} % off?"}],
        "answer": f"{cost * (100 - percent) / 100:.2f}",
    }
    for name, cost in PRICES.items()
    for percent in (5, 10, 20, 25)
]
config = SalesGRPOConfig(
    "runs/agent",
    max_steps=int(os.environ.get("STEPS", "20")),
    max_completion_length=256,  # of all turns, including tool results
    use_vllm="USE_VLLM" in os.environ,
    report_to="none",
)
trainer = SalesGRPOTrainer(os.environ.get("MODEL", "Qwen/Qwen3-0.6B"), episode, config, Dataset.from_list(rows))
trainer.train()
trainer.finish()
