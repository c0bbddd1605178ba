"""A conversation's partner and its policy: scripted turns over the code that runs conversations."""

import asyncio
import threading
from types import SimpleNamespace

from salesrl_trl.agents.chat_turns import ForeignText
from salesrl_trl.agents.partner import Partner, Reply
from salesrl_trl.agents.tool_turns import ToolTurns
from salesrl_trl.agents.tools import ToolCalls
from salesrl_trl.generation.turns import Turn

PROMPT = [{"role": "user", "content": "Hello."}]


class Scripted(Partner):
    """Replies what `says` returns for the number of the policy's turns so far, from the row and the messages."""

    name = "customer"

    def __init__(self, says, **fields):
        self.says, self.asked = says, []
        vars(self).update(fields)

    async def reply(self, row, messages):
        self.asked.append((row, messages))
        said = self.says(row, messages)
        said = await said if asyncio.iscoroutine(said) else said
        return said if isinstance(said, Reply) else Reply(text=said)


class Talks:
    """`ToolTurns` on a loop of its own, with a policy whose turns are given as texts."""

    def __init__(self, tokenizer, partner, tools=(), most_completion=4000, most_turns=3):
        self.tokenizer, self.loop = tokenizer, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        form = {"kwargs": {}, "ends": frozenset([tokenizer.eos_token_id]), "most_completion": most_completion,
                "most_tokens": 10 * most_completion}  # fmt: skip
        access = SimpleNamespace(
            thread_tokenizer=tokenizer, chat_template=None, form=form, functions=list(tools), most_turns=most_turns,
            keeps_records=True, tools_loop=self.loop, use_environments=list,
        )  # fmt: skip
        self.turns = ToolTurns(access, ForeignText(tokenizer, None), partner)
        self.calls = ToolCalls(each.__name__ for each in self.turns.functions)

    def ids_of(self, text):
        """Tokens that the text is not encoded to: one for each character."""
        marks = text.replace("<tool_call>", "\0").replace("</tool_call>", "\1")
        pieces = [{"\0": "<tool_call>", "\1": "</tool_call>"}.get(each, each) for each in marks]
        own = [token for piece in pieces for token in self.tokenizer(piece)["input_ids"]]
        return [*own, self.tokenizer.eos_token_id]

    def talk(self, texts, row=None, place=0, versions=None):
        """One conversation, and the tokens that its policy sampled, a list for each turn. `versions`: of each turn's
        tokens, if the engine reports them."""
        row = {"prompt": PROMPT} if row is None else row
        left, sampled = iter(texts), []

        def turn():
            ids = self.ids_of(next(left))
            sampled.append(ids)
            reported = None if versions is None else [versions[len(sampled) - 1]] * len(ids)
            return Turn(ids, [-len(sampled) - at / 1000 for at in range(len(ids))], reported)

        prompt_ids = self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        return self.turns.talk(place, prompt_ids, turn(), lambda ids: turn(), self.calls, row), sampled

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
