"""The small policy: made, cached, and taught in a process of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from salesrl_trl.data.prompts import action_text, build_prompt
from salesrl_trl.data.sources import load_drafts
from salesrl_trl.demo import policy
from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.types import Action


@pytest.fixture(scope="module")
def tokenizer():
    return policy.build_tokenizer()


def test_every_action_of_the_demo_survives_the_tokenizer(tokenizer):
    for _, drafts in list(load_drafts())[:200]:
        text = action_text(Action(fields=drafts[0]))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_actions_fixed_text_is_a_token_each(tokenizer):
    ids = tokenizer('{"user_profile": "", "rewritten_query": "", "history_summary": ""}')["input_ids"]
    assert len(ids) == len(policy._PIECES)


def test_prompts_fit_the_model_with_room_for_an_action(tokenizer):
    longest = max(
        len(tokenizer.apply_chat_template(build_prompt(row, "compact"), add_generation_prompt=True)["input_ids"])
        for row, _ in load_drafts()
    )
    assert longest + 64 <= policy.MAX_POSITIONS


def test_the_model_is_one_vllms_cpu_backend_takes(tokenizer):
    config = policy.build_model(tokenizer).config
    assert config.hidden_size // config.num_attention_heads >= 32
    assert not config.tie_word_embeddings
    assert config.vocab_size >= len(tokenizer)


def test_processes_that_ask_at_once_share_one_warm_start(tmp_path, monkeypatch):
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path))
    made = tmp_path / "made"
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\necho "$@" >>"{made}"\nsleep 0.3\nmkdir "$3"\ntouch "$3/config.json"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(policy.sys, "executable", str(shell))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: policy.cached_policy(steps=2, seed=3), range(2))
    assert first == second
    assert (first / "config.json").is_file()
    [command] = made.read_text().splitlines()  # tests/integration/test_launch.py has one that is really made
    assert command.startswith("-m salesrl_trl.demo.policy ")
    assert command.endswith("/policy --steps 2 --seed 3")


def test_a_cache_that_can_only_be_read_will_do_if_it_holds_the_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path))
    folder = policy._policy_folder(2, 0)
    folder.mkdir(parents=True)
    folder.with_name(f"{folder.name}.lock").mkdir()  # in place of a folder without the right to write
    with pytest.raises(ConfigError, match=r"can't be kept in .* Set the environment variable SALESRL_CACHE_DIR to"):
        policy.cached_policy(steps=2, seed=0)
    (folder / "config.json").touch()
    assert policy.cached_policy(steps=2, seed=0) == folder


def test_a_warm_start_that_fails_says_so_and_leaves_no_half_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(policy.sys, "executable", "/bin/false")
    with pytest.raises(SalesRLError, match="failed with exit code 1"):
        policy.cached_policy(steps=2, seed=0)
    assert [path for path in (tmp_path / "policies").iterdir() if path.is_dir()] == []


def test_the_warm_start_sees_one_gpu_and_nothing_of_the_launcher(tmp_path, monkeypatch):
    # With two, the Trainer of one process would double the batch: another policy under the same name in the cache.
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\nenv >"{tmp_path}/seen"\nmkdir "$3"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(policy.sys, "executable", str(shell))
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("RANK", "1")
    policy.cached_policy(steps=2, seed=0)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert "CUDA_VISIBLE_DEVICES=2" in seen
    assert not [line for line in seen if line.startswith("RANK=")]


def test_another_seed_or_length_is_another_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path))
    made = []

    def make(target, module, steps, seed):
        target.mkdir()
        (target / "config.json").touch()
        made.append((steps, seed))

    monkeypatch.setattr(policy, "_make_in_subprocess", make)
    for steps, seed in ((2, 0), (2, 1), (3, 0), (2, 0)):
        policy.cached_policy(steps, seed)
    assert made == [(2, 0), (2, 1), (3, 0)]
