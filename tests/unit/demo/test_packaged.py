"""The packaged small policies: their files, tokenizers, place in vLLM, and the scripts that taught them."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from salesrl_trl.demo.packaged import DIALOGUE_POLICY, PACKAGED, PROMPT_STYLE, SEARCH_POLICY, packaged_tokenizer
from salesrl_trl.launch.data.prompts import build_prompt
from salesrl_trl.launch.data.sources import load_drafts, load_rows

ROOT = Path(__file__).parents[3]
MAX_BYTES = 8 * 10**6


@pytest.fixture(scope="module")
def tokenizer():
    return packaged_tokenizer()


def test_every_action_of_the_demo_survives_the_tokenizer(tokenizer):
    for _, drafts in list(load_drafts())[:200]:
        text = json.dumps(drafts[0], ensure_ascii=False)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_actions_fixed_text_is_a_token_each(tokenizer):
    assert len(tokenizer('{"user_profile": "", "rewritten_query": "", "history_summary": ""}')["input_ids"]) == 4


def test_prompts_fit_the_model_with_room_for_an_action(tokenizer):
    longest = max(
        len(tokenizer.apply_chat_template(build_prompt(row, PROMPT_STYLE), add_generation_prompt=True)["input_ids"])
        for row in load_rows("demo", "train", ("fairness", "hallucination"))
    )
    assert longest + 64 <= AutoConfig.from_pretrained(PACKAGED).max_position_embeddings


def test_it_is_small_and_one_that_vllms_cpu_backend_takes(tokenizer):
    config = AutoConfig.from_pretrained(PACKAGED)
    assert config.hidden_size // config.num_attention_heads >= 32
    assert not config.tie_word_embeddings
    assert config.vocab_size >= len(tokenizer)
    assert sum(path.stat().st_size for path in PACKAGED.iterdir()) < MAX_BYTES
    with safe_open(PACKAGED / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118


def test_its_script_teaches_one_of_the_same_form_and_measures_it(tmp_path, monkeypatch, one_thread):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    words = ["--out", str(tmp_path), "--steps", "1", "--conversations", "120", "--rows", "4"]
    monkeypatch.setattr(sys, "argv", ["make_demo_policy.py", *words])
    script = importlib.import_module("make_demo_policy")
    monkeypatch.setattr(script, "ROWS_AT_ONCE", 120)
    script.main()
    assert (tmp_path / "tokenizer.json").read_bytes() == (PACKAGED / "tokenizer.json").read_bytes()
    for name in ("config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (PACKAGED / name).read_text()
    made, packaged = (json.loads((folder / "figures.json").read_text()) for folder in (tmp_path, PACKAGED))
    assert made.keys() == packaged.keys()
    assert packaged["right_document"] > 0.5  # one of 13 topics by chance


def test_trl_calls_tools_by_the_search_policy_s_template_and_its_script_teaches_it(tmp_path, monkeypatch, one_thread):
    tokenizer = AutoTokenizer.from_pretrained(SEARCH_POLICY)
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)
    tools = [{"function": {"name": "search", "parameters": {"properties": {"query": {}}}}}]
    greets = {"role": "user", "content": "Hi"}
    calls = [{"type": "function", "function": {"name": "search", "arguments": {"query": 'a "b" 价格'}}}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    prefix, whole = (
        tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=not number, return_dict=False)
        for number, messages in enumerate(([greets], [greets, call]))
    )
    assert whole[: len(prefix)] == prefix
    assert parse_response(tokenizer, whole[len(prefix) :], prefix=prefix, tools=tools)["tool_calls"] == calls
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "argv", ["make_search_policy.py", "--out", str(tmp_path), "--steps", "3", "3", "3"])
    script = importlib.import_module("make_search_policy")
    for name, few in {"LESSONS": 1, "COPIES": 8, "BATCH": 4}.items():
        monkeypatch.setattr(script, name, few)
    script.main()
    for name in ("tokenizer.json", "config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (SEARCH_POLICY / name).read_text()
    assert sum(path.stat().st_size for path in SEARCH_POLICY.iterdir()) < 10**6
    monkeypatch.setattr(sys, "argv", ["make_dialogue_policy.py", "--out", str(tmp_path / "dialogue"), "--steps", "3"])
    dialogue, measure = importlib.import_module("make_dialogue_policy"), script.share_of_right
    monkeypatch.setattr(dialogue, "LESSONS", 1)
    monkeypatch.setattr(dialogue, "share_of_right", lambda *given: measure(*given[:2], given[2][:2], given[3]))
    dialogue.main()
    for name in ("tokenizer.json", "config.json", "chat_template.jinja"):
        assert (tmp_path / "dialogue" / name).read_text() == (DIALOGUE_POLICY / name).read_text()
    assert sum(path.stat().st_size for path in DIALOGUE_POLICY.iterdir()) < 10**6
