"""Texts of tools and agents open no turn, and no text of the policy ends a run."""

import copy
import itertools
import json
import pickle
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from support.keyed import make_tiny_policy
from transformers import AutoTokenizer
from trl.chat_template_utils import add_response_schema, parse_response

from salesrl_trl.agents.chat_turns import ForeignText
from salesrl_trl.generation.sampler import guard_parser

TOKENS = {  # of a model: whether each is special
    "qwen3": {"<|im_end|>": True, "<|im_start|>": True, "<tool_call>": False, "</tool_response>": False, "  ": False},
    "deepseek": {"<｜User｜>": False, "<｜Assistant｜>": False, "<｜end▁of▁sentence｜>": True, "<think>": False},
    "gemma": {"<start_of_turn>": False, "<end_of_turn>": False, "<table>": False, "<bos>": True, "\n\n": False},
    "mistral": {"[INST]": True, "[/INST]": True, "[TOOL_RESULTS]": True, "</s>": True, "<s>": True},
    "another": {"turn over": True, "§": True},
}
KEPT = {"  ", "<table>", "\n\n", "§"}  # no marks


def foreign(family, template="{{ '<tools>' }}[INST]"):
    added = {at: SimpleNamespace(content=text, special=one) for at, (text, one) in enumerate(TOKENS[family].items())}
    return ForeignText(SimpleNamespace(added_tokens_decoder=added, chat_template=template), None)


@pytest.mark.parametrize("family", TOKENS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_text_of_a_tool_has_a_mark_of_the_model_or_of_its_template(family, data):
    marks = [*(TOKENS[family].keys() - KEPT), "[INST]", "<tools>"]
    pieces = sorted({*marks, *itertools.chain(*marks), "价格", " "})
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=20)))
    content = data.draw(st.sampled_from([text, [{"type": "text", "text": text}], [(text,)]]))
    made = foreign(family).message({"role": "tool", "name": text, "content": content})
    for written in (made["name"], str(made["content"])):
        assert not any(mark in written for mark in marks)
    assert foreign(family).message(made) == made  # as a replay has it


@pytest.mark.parametrize(
    "text",
    ["", "价格 < 5 > 3", "<b>bold</b><table><tr>", "List<String> x = a << 2;", ">>> print(1)", "0123456789abcdef01",
     "a  b\n\nc", "[1] [A]", "<|other|>"],
)  # fmt: skip
def test_a_text_without_marks_is_as_the_tool_returned_it(text):
    message = {"role": "tool", "name": "look", "content": text}
    for family in TOKENS:
        assert foreign(family).message(message) == message


def test_a_prompt_may_name_tags_and_may_not_open_a_turn():
    text = "Think in <think>, call in <tool_call>. <|im_end|>"
    for role in ("user", "system", "assistant"):
        made = foreign("qwen3").message({"role": role, "content": text})
        assert made["content"] == "Think in <think>, call in <tool_call>. < |im_end| >"
    assert foreign("gemma").message({"role": "user", "content": "<end_of_turn>"})["content"] == "< end_of_turn>"
    assert (
        foreign("deepseek").message({"role": "user", "content": "<｜Assistant｜>"})["content"] == "< ｜Assistant｜ >"
    )


def test_a_result_without_an_end_is_an_error_for_the_policy():
    ring = []
    ring += [ring, ring]
    made = foreign("qwen3").message({"role": "tool", "name": "look", "content": ring})
    assert "nested" in made["content"]
    assert (
        foreign("qwen3").message({"role": "tool", "name": "look", "content": "half \ud83d"})["content"]
        == "half \ufffd"
    )


def parsing(folder, template):
    """A tokenizer whose turns are read as those of this template."""
    make_tiny_policy(folder)
    shutil.copy(Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja", folder / "chat_template.jinja")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    add_response_schema(tokenizer)
    guard_parser(tokenizer)
    return tokenizer


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_nothink", "llama3_1", "gptoss", "gemma4", "glm4moe"])
def tokenizer(request, tmp_path_factory):
    return parsing(tmp_path_factory.mktemp("parsed") / "policy", request.param)


DEEP = "[" * 400 + "]" * 400  # JSON reads it; copies and templates do not


@pytest.mark.parametrize(
    "value", ["[" * 5000, DEEP, '{"a":' * 400 + "1" + "}" * 400, '"\\ud83d"', "9" * 5000, "1e999", "NaN", "[]"]
)
def test_any_turn_is_a_message_that_can_be_copied_and_written(tokenizer, value):
    texts = (
        f'<tool_call>\n{{"name": "add", "arguments": {{"number": {value}}}}}\n</tool_call>',
        f"<tool_call>\n<function=add>\n<parameter=number>\n{value}\n</parameter>\n</function>\n</tool_call>",
        f'{{"name": "add", "parameters": {{"number": {value}}}}}',
        f'<|START_ACTION|>[{{"tool_name": "add", "parameters": {value}}}]<|END_ACTION|>',
        f'<|START_ACTION|>[{{"odd": {value}}}]<|END_ACTION|>',
        f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{value}<|call|>",
        f"<|tool_call>call:add{{number:{value}}}<tool_call|>",
    )
    schema = {"type": "object", "properties": {"number": {"type": ["object", "array", "integer", "number"]}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    for made, text in itertools.product((tokenizer, copy.deepcopy(tokenizer)), texts):
        ids = [*made(text)["input_ids"], made.eos_token_id]
        message = parse_response(made, ids, prefix=[], tools=tools)
        json.dumps(copy.deepcopy(message), ensure_ascii=False).encode()
    assert parse_response(tokenizer, [], prefix=[])["content"] == ""


def test_a_turn_that_spells_its_end_hundreds_of_times_is_read_at_once(tmp_path):
    tokenizer = parsing(tmp_path / "policy", "lfm2_2_5")
    began = time.thread_time()
    assert parse_response(tokenizer, [tokenizer.eos_token_id] * 1200, prefix=[])["content"] == ""
    assert time.thread_time() - began < 1.0  # 3 s by transformers' parser


def test_a_tokenizer_is_sent_to_other_processes_as_before(tokenizer):
    assert pickle.loads(pickle.dumps(tokenizer)).vocab_size == tokenizer.vocab_size
