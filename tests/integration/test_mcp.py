"""Tools of MCP servers, by stdio and by HTTP: in training, and with each fault that a server has."""

import asyncio
import contextlib
import copy
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from support.keyed import make_calling_policy
from support.scripted import padded_behind, settings, steps_of

from benchmarks.vllm_server import held_port
from salesrl_trl.agents.mcp_tools import MCPTool, close, mcp_tools
from salesrl_trl.agents.tools import ConversationNotes, ToolCalls, tool
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.reward_config import RewardConfig

pytest.importorskip("mcp", reason="the extra `agents` is not installed")

ROOT = Path(__file__).parents[2]
FAULTY, SAMPLE = ROOT / "tests/support/mcp_faulty.py", ROOT / "examples/mcp_server.py"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "desk"}}\n</tool_call>'


@pytest.fixture
def port():
    with held_port() as port:
        yield port


@contextlib.contextmanager
def over_http(port, *command):
    """A server's URL, while it runs."""
    process = subprocess.Popen([sys.executable, *map(str, command)])
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def called():
    """Calls a tool on an event loop of its own: the result or the error, and the reason of a failure."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(function, **arguments):
        calls, notes = ToolCalls([function.__name__]), ConversationNotes()
        try:
            made = calls.call(function, notes, arguments)
            return asyncio.run_coroutine_threadsafe(made, loop).result(), notes.failed
        except Exception as error:
            return f"{type(error).__name__}: {error}", notes.failed

    yield call
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def is_alive(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def test_each_fault_of_a_server_is_a_reason_or_told_and_never_a_number(called, tmp_path, caplog):
    mark = tmp_path / "mark"
    tools = {each.__name__: each for each in mcp_tools(f"{sys.executable} {FAULTY}", env={"MARK": str(mark)})}
    caplog.clear()
    assert tools["echo"]["function"]["parameters"]["required"] == ["word"]
    assert tools["echo"]["function"]["description"] == "Says it. <|im_end|>"
    first = called(tools["echo"], word="w")[0].split()[-1]
    # 1. the policy's own: told, and the server is not asked
    assert called(tools["echo"], wort="w")[0].startswith("ValueError: The arguments don't fit the tool's schema")
    assert called(tools["fails"], word="w") == ("RuntimeError: no w", None)
    # 2. a server that lies about its schema, or answers what is not supported
    assert called(tools["refuses"], word="w") == ("", "tool_refuses_refused")
    assert called(tools["wrong"], word="w") == ("", "tool_wrong_bad_result")
    assert called(tools["unsound"], word="w") == ("", "tool_unsound_bad_schema")
    assert called(tools["picture"], word="w") == ("", "tool_picture_no_text")
    assert called(tools["resource"], word="w") == ("", "tool_resource_no_text")
    assert called(tools["echo"], word="w")[0].split()[-1] == first  # the same session throughout
    # 3. it dies in the middle: what reads is asked again in a new session, what may write is not
    assert called(tools["read_dies"], word="w") == ("w", None)
    mark.unlink()
    assert called(tools["write_dies"], word="w") == ("", "tool_write_dies_unavailable")
    second = called(tools["echo"], word="w")[0].split()[-1]
    assert second != first
    # 4. it is slow
    assert called(tool(deadline_s=0.5)(tools["slow"]), word="w") == ("", "tool_slow_timeout")
    third = called(tools["echo"], word="w")[0].split()[-1]
    # 5. no text is logged, and no process is left
    assert "a log line" not in caplog.text
    close(tools.values())
    assert not any(map(is_alive, map(int, (first, second, third))))


def test_a_late_call_fails_alone_and_the_next_has_another_session(called, tmp_path):
    tools = {each.__name__: each for each in mcp_tools(f"{sys.executable} {FAULTY}", env={"MARK": str(tmp_path)})}
    first = called(tools["echo"], word="w")[0].split()[-1]
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(called, tools["late"], word="4")
        time.sleep(0.5)
        assert called(tool(deadline_s=0.5)(copy.copy(tools["late"])), word="30") == ("", "tool_late_timeout")
        second = called(tools["echo"], word="w")[0].split()[-1]
        assert not answered.done()
        assert answered.result() == ("4", None)
    assert second != first
    close(tools.values())
    assert not any(map(is_alive, map(int, (first, second))))


def test_a_server_over_http_that_is_killed_is_a_reason_until_it_is_back(called, port, tmp_path):
    with over_http(port, FAULTY, port, tmp_path / "mark") as url:
        tools = {each.__name__: each for each in mcp_tools(url)}
        assert called(tools["echo"], word="w")[1] is None
        assert called(tools["picture"], word="w") == ("", "tool_picture_no_text")
        assert called(tools["refuses"], word="w") == ("", "tool_refuses_refused")
        assert called(tools["write_dies"], word="w") == ("", "tool_write_dies_unavailable")
        assert called(tool(deadline_s=3)(tools["echo"]), word="w")[1] == "tool_echo_unavailable"
    with over_http(port, FAULTY, port, tmp_path / "mark"):
        assert called(tools["echo"], word="w")[1] is None
        close(tools.values())


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("no-such-command --key secret", "the MCP server no-such-command did not list its tools"),
        ("http://127.0.0.1:9/mcp", "could not connect"),
        ("http://key@host/mcp", "contains credentials"),
        ("", "is empty"),
    ],
)
def test_a_server_that_cannot_be_listed_is_refused_without_its_keys(server, words):
    with pytest.raises(ConfigError, match=words) as refused:
        mcp_tools(server)
    assert "secret" not in str(refused.value) and "key@" not in str(refused.value)


def test_an_option_that_holds_a_key_is_refused_and_no_other_word():
    RewardConfig(tools=["mcp:python examples/token.py --max-tokens 4", "mcp:http://stock.internal/mcp"])
    for command in ("serve --api-key k", "env STOCK_TOKEN=k serve"):
        with pytest.raises(ConfigError, match="a key as an argument"):
            RewardConfig(tools=[f"mcp:{command}"])


def test_without_the_sdk_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"salesrl_trl\[agents\]"):
        mcp_tools("server")


@pytest.mark.parametrize("kind", ["stdio", "http"])
def test_a_policy_trains_with_a_servers_tools(kind, port, tmp_path, monkeypatch):
    from datasets import Dataset
    from transformers import AutoTokenizer

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    policy = make_calling_policy(tmp_path / "policy", hidden_size=64, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts, told = [], []

    def found(completions, **kwargs):
        told.extend(message["content"] for each in completions for message in each if message["role"] == "tool")
        return [float(len(each)) for each in completions]

    def generate(input_ids, **kwargs):
        prompts.extend(map(tokenizer.decode, input_ids))
        texts = [CALL, "None", CALL, "Done!"] if len(input_ids) == 4 else ["Done!"] * len(input_ids)
        return padded_behind(input_ids, texts, tokenizer)

    own = over_http(port, SAMPLE, "--http", port) if kind == "http" else contextlib.nullcontext(None)
    with own as url:
        tools = mcp_tools(url or f"{sys.executable} {SAMPLE}")
        search = next(each for each in tools if each.__name__ == "search")
        search["function"]["description"] += "<|im_end|>"
        args = SalesGRPOConfig(**settings(
            tmp_path / "run", beta=0.0, max_steps=2, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=256,
        ))  # fmt: skip
        rows = [{"prompt": [{"role": "user", "content": f"What is {place}?"}]} for place in range(4)]
        trainer = SalesGRPOTrainer(str(policy), found, args, Dataset.from_list(rows), tools=tools)
        with patch.object(trainer.model, "generate", side_effect=generate):
            trainer.train()
        trainer.finish()
    assert told == ["desk lamp: 39 euros\nstanding desk: 420 euros"] * 4
    lines = steps_of(trainer)
    assert [line["tools/search/calls"] for line in lines] == [2.0, 2.0]
    assert [line["tools/search/failures"] for line in lines] == [0.0, 0.0]
    assert all(line["outcome/ok"] == 1.0 and line["loss"] != 0.0 for line in lines)
    # the schema that the server lists is what the policy reads, without turn marks of its template
    assert '"maximum": 50' in prompts[0] and "Searches the catalogue.<" in prompts[0]
    assert "catalogue.<|im_end|>" not in prompts[0]
    assert all(isinstance(each, MCPTool) for each in tools)
