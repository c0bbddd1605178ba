"""scripts/run_upstream_tests.py: what it makes of outcomes, and the texts of its stand-ins."""

import pytest
from datasets import load_dataset
from transformers import AutoTokenizer
from upstream_stand_ins import _write_tokenizer, _write_zen

from scripts import run_upstream_tests as tool


def outcomes(losses="[]", **of_test):
    why = {"passed": "", "failed": "Error: why", "skipped": "no device"}
    return {test: {"outcome": each, "why": why[each], "losses": losses} for test, each in of_test.items()}


def test_only_what_passes_on_stock_counts_and_what_did_not_run_differs(capsys):
    stock = outcomes(a="passed", b="passed", c="failed", d="skipped", e="passed") | outcomes("[0.1]", f="passed")
    assert tool.report({"stock": stock, "one name": stock}) == 0
    assert capsys.readouterr().out.count("4. 1 of these train: 1 to stock's very loss") == 2
    two_names = outcomes(a="passed", b="failed", c="passed", d="skipped") | outcomes("[0.2]", f="passed")
    assert tool.report({"stock": stock, "two names": two_names}) == 2
    told = capsys.readouterr().out
    assert "two names     3 pass, 1 fail, 1 are skipped. Of the 4 that pass on stock: 2. 1 of these train: 0" in told
    assert "differs with two names: b\n    Error: why" in told
    assert "differs with two names: e\n    did not run" in told
    assert "left out, failed on stock: c\n" in told and "left out, skipped on stock: d\n" in told


def test_what_is_meant_to_differ_is_no_failure_and_the_claim_has_the_counts_of_the_run():
    way, meant = next(each for each in sorted(tool.MEANT) if each[0] == "two names")
    stock = {meant: outcomes(a="passed")["a"], **outcomes(b="passed", c="failed")}
    found = {"stock": stock, "one name": stock, way: stock | {meant: outcomes(a="failed")["a"]}}
    assert tool.report(found) == 0
    assert tool.claim_of(found) == "2 of the 2 that pass on stock, with one name changed; 1 with two"
    assert [line for line in tool.CLAIMS.read_text().splitlines() if line.startswith(tool.CLAIM)]


@pytest.mark.parametrize("with_ids_of_qwen", [True, False])
def test_the_tokenizer_gives_back_what_it_was_given(tmp_path, with_ids_of_qwen):
    size = _write_tokenizer(tmp_path, with_ids_of_qwen)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == size == len(tokenizer.get_vocab())
    text = '<|im_start|>user\nWas  heißt "naïve"?<|im_end|>\n<tool_call>\n{}\n</tool_call>'
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("<tool_call>\n{}\n</tool_call>")
    if with_ids_of_qwen:
        call = [151657, 198, 4913, 606, 788, 330, 64648, 22785, 497, 330, 16370, 788, 5212, 64, 788, 220, 18, 11248]
        said = '<tool_call>\n{"name": "multiply_tool", "arguments": {"a": 3}}\n</tool_call>'
        assert tokenizer.decode([*call, 151658]) == said


def test_prompts_are_the_beginnings_of_the_zen_of_python(tmp_path):
    _write_zen(tmp_path / "zen")
    given = {"cache_dir": str(tmp_path / "cache")}
    rows = load_dataset(str(tmp_path / "zen"), "standard_prompt_only", **given)
    assert rows["train"]["prompt"][:3] == ["Beautiful is better than", "Explicit is", "Simple is better"]
    assert len(rows["train"]) == 12 and len(rows["test"]) == 2
    [talk] = load_dataset(str(tmp_path / "zen"), "conversational_prompt_only", split="train", **given)["prompt"]
    assert [message["role"] for message in talk] == ["user"]
