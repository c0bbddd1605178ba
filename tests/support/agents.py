"""An agent's policy: texts by turns, as tokens, and the requests of one episode that ask for them."""

import asyncio

import openai
from transformers import AutoTokenizer

from salesrl_trl.agents.chat_turns import AgentCalls, ChatForm, ForeignText
from salesrl_trl.generation.turns import Turn
from support.keyed import make_calling_policy

CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "找"}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"word": {"type": "string"}}}}}  # fmt: skip
ASKED = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What is it?"}]


def chat_tokenizer(folder):
    """One whose chat template is one that TRL reads tool calls of."""
    return AutoTokenizer.from_pretrained(make_calling_policy(folder))


class Policy:
    """Samples texts by turns, as tokens that their text is not encoded to: one for each character."""

    def __init__(self, tokenizer, texts, most_completion=1000, versions=None):
        self.tokenizer, self.texts, self.asked, self.sampled = tokenizer, iter(texts), [], []
        self.versions = versions and iter(versions)  # of each turn's tokens, if the engine reports them
        ends = frozenset([tokenizer.eos_token_id])
        sizes, foreign = {"most_tokens": 4000, "most_completion": most_completion}, ForeignText(tokenizer, None)
        form = ChatForm.of(tokenizer, foreign, None, kwargs={}, ends=ends, **sizes)
        self.calls = AgentCalls(form, self.turn)

    def turn(self, ids):
        text = next(self.texts)
        marks = text.replace("<tool_call>", "\0").replace("</tool_call>", "\1")
        pieces = [{"\0": "<tool_call>", "\1": "</tool_call>"}.get(each, each) for each in marks]
        own = [token for piece in pieces for token in self.tokenizer(piece)["input_ids"]]
        own.append(self.tokenizer.eos_token_id)
        self.asked.append(ids)
        self.sampled.append(own)
        logprobs = [-len(self.asked) - place / 100 for place in range(len(own))]
        return Turn(own, logprobs, None if self.versions is None else [next(self.versions)] * len(own))

    def talk(self, endpoint, agent):
        """What `agent` returns, a coroutine function of a client."""

        async def talked():
            with endpoint.open(self.calls) as key:
                async with openai.AsyncOpenAI(base_url=endpoint.address, api_key=key, max_retries=0) as client:
                    return await agent(client.chat.completions.create)

        return asyncio.run(talked())
