"""The examples train as they stand, with the packaged policy in place of one of the hub."""

import asyncio
import contextlib
import difflib
import json
import math
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import httpx2
import pytest
from run_notebook import fingerprint  # of scripts/
from support.forked import COLD_PYTHON, FORGET, python
from support.loopback import VERDICT, action, chat_completion, row, score_batch
from support.wheel import built_wheel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOTrainer
from werkzeug import Response

from benchmarks.vllm_server import held_port
from salesrl_trl.demo.packaged import SEARCH_POLICY
from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.launch.assembly import NOWHERE, build_reward
from salesrl_trl.launch.checks.reward import prepare_reward
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.trainer import SalesGRPOTrainer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def example(monkeypatch, tmp_path, policy_path):
    """Run an example as `python examples/NAME.py` does. Returns its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", str(policy_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = []

    def run(name):
        ran.append(runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__"))
        return ran[-1]

    yield run
    for names in ran:
        if hasattr(names["trainer"], "finish"):
            names["trainer"].finish()


def last_line(names):
    """The log entry with the figures of the last steps."""
    trainer = names["trainer"]
    assert trainer.state.global_step == trainer.args.max_steps
    return [entry for entry in trainer.state.log_history if "reward" in entry][-1]


def changes():
    before, after = ((EXAMPLES / f"trl_{name}.py").read_text("utf-8").splitlines() for name in ("before", "after"))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@")]


def test_two_names_and_one_setting_are_the_whole_difference_and_the_readme_shows_it():
    assert [line[0] for line in changes()] == ["-", "+", "+"]
    assert "SalesGRPOConfig as GRPOConfig, SalesGRPOTrainer as GRPOTrainer" in changes()[1]
    opening = (ROOT / "README.md").read_text("utf-8").split("\n## ")[0]
    [shown] = re.findall(r"^```diff\n(.*?)^```", opening, flags=re.DOTALL | re.MULTILINE)
    assert [line for line in shown.splitlines() if line != " ..."] == changes()


def test_the_ten_lines_around_any_call_run_as_they_stand(capsys):
    page = (ROOT / "docs/reference/reward-functions.md").read_text("utf-8")
    [snippet] = re.findall(r"^```python\n(import asyncio\n.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    tried = Counter()

    async def ask(query):
        tried[query] += 1
        if query == "down" or (query == "at times" and tried[query] == 1):
            raise ServiceUnavailable("no answer", f"{query}_code")
        return query

    names = {"ask": ask, "queries": ["up", "at times", "down"]}
    exec(snippet, names)
    asyncio.run(names["main"]())
    assert tried == {"up": 1, "at times": 2, "down": 3}
    said = capsys.readouterr().out
    assert said.startswith("['down_code'] ") and "'retries': 3" in said


def test_the_scripts_before_and_after_train_on_the_same_rewards(example):
    stock, ours = example("trl_before"), example("trl_after")
    assert type(stock["trainer"]) is GRPOTrainer and type(ours["trainer"]) is SalesGRPOTrainer
    assert ours["trainer"].args.rollout_lookahead == 1
    figures = {"reward", "rewards/correct/mean", "rewards/brief/mean"}
    for line in (last_line(stock), last_line(ours)):
        assert figures <= line.keys()
        assert 0 < line["rewards/brief/mean"] < 1
    assert last_line(ours)["outcome/ok"] == 1.0


def test_the_judge_is_asked_again_when_it_is_busy_or_down(example, services, monkeypatch):
    def verdict(request):
        asked = services.calls["judge"]
        if asked % 5 == 0:
            return 429, "{}", {"Retry-After": "0"}
        if asked % 7 == 0:
            return 503, "{}"
        if asked == 1:
            return 200, chat_completion("I like it.")
        assert "Right answer: " in request.json["messages"][1]["content"]
        return 200, chat_completion(json.dumps({"right": 0.5, "polite": asked % 2, "why": "fine"}))

    services.signs, services.functions["judge"] = False, verdict
    monkeypatch.setenv("OPENAI_BASE_URL", f"{services.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "a key of tests")
    line = last_line(example("judge"))
    assert line["outcome/ok"] == 1.0
    assert line["rewards/helpful/right"] == 0.5
    assert 0.4 < line["rewards/helpful/mean"] < 0.6
    assert all(line[f"services/judge/{name}"] > 0 for name in ("calls", "sent", "retries", "overloads", "failures"))


def test_the_packaged_judge_scores_beside_a_function_by_reference_and_criteria(example, services, monkeypatch):
    verdict = {"candidate": [0.5, 1.0], "reference": [1.0, 1.0], "reason": "fine"}
    services.verdict(json.dumps(verdict))
    monkeypatch.setenv("JUDGE_BASE_URL", f"{services.url}/v1")
    monkeypatch.setenv("JUDGE_API_KEY", "a-key-of-tests")
    names = example("packaged_judge")
    line = last_line(names)
    assert line["rewards/judge/mean"] == pytest.approx((0.5 + 0.2 * 1.0) / 1.2)
    assert line["rewards/judge/polite"] == 1.0
    assert line["outcome/ok"] == 1.0
    spent = json.loads((Path(names["OUTPUT"]) / "budget.json").read_text("utf-8"))
    assert str(services.calls["judge"]) in json.dumps(spent)


def test_an_agent_with_two_tools_plays_its_conversations(example, monkeypatch):
    monkeypatch.setenv("MODEL", str(SEARCH_POLICY))
    monkeypatch.setenv("STEPS", "1")
    names = example("agent")
    assert last_line(names)["outcome/ok"] == 1
    assert names["run_tool"]("price", '{"article": "desk lamp"}') == "39 euros"
    assert names["run_tool"]("discount", '{"price": 39, "percent": 10}') == "35.10 euros"
    assert names["run_tool"]("discount", "{").startswith("error: ")


def test_code_is_run_within_limits_and_without_the_trainers_environment(example, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    monkeypatch.setattr("sys.executable", COLD_PYTHON)  # a fork of the tests' process is above the limit of memory
    names = example("code_runner")
    assert last_line(names)["outcome/ok"] == 1.0
    right = "print(6 * 7)"
    codes = {
        right: 1.0,
        "print('42 ')": 1.0,
        "print(41)": 0.0,
        f"{right}; raise SystemExit(1)": 0.0,
        "this is no Python": 0.0,
        f"import time; {right}; time.sleep(60)": 0.0,
        f"text = 'a' * 2**31; {right}": 0.0,
        f"import sys; open('big', 'w').write('a' * 2**21); {right}": 0.0,
        f"import os; assert 'A_KEY' not in os.environ and os.listdir() == ['printed', 'code.py']; {right}": 1.0,
    }
    completions = [[{"role": "assistant", "content": code}] for code in codes]
    count = len(codes)
    asked = names["runs"](prompts=[""] * count, completions=completions, output=["42"] * count)
    assert dict(zip(codes, asyncio.run(asked), strict=True)) == codes


def test_a_reward_model_counts_beside_a_function_that_does_not_apply_to_all(
    example, policy_path, monkeypatch, tmp_path
):
    config = AutoConfig.from_pretrained(policy_path)
    config.num_labels, config.pad_token_id = 1, 0
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "scorer")
    AutoTokenizer.from_pretrained(policy_path).save_pretrained(tmp_path / "scorer")
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path / "scorer"))
    line = last_line(example("reward_model"))
    assert line["outcome/ok"] == 1.0
    assert {"rewards/short_enough/mean", "rewards/scorer/mean"} <= line.keys()


def notebook():
    return json.loads((EXAMPLES / "notebook.ipynb").read_text("utf-8"))


def test_the_notebooks_outputs_are_those_of_its_cells():
    """`scripts/run_notebook.py` stores them, with a hash of the code that they belong to."""
    assert notebook()["metadata"]["salesrl_trl"] == {"outputs_of": fingerprint(notebook())}
    code = [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"execute_result", "stream"}  # no error
    assert "text/html" in code[-1]["outputs"][-1]["data"]


KERNEL = f"""{FORGET}
import asyncio, json
from trl import import_utils
import_utils.is_vllm_available = lambda *_, **__: False  # an import of 4 s of CPU
import salesrl_trl
"""
KERNEL += """

async def kernel(cells):  # as a notebook's kernel does it: inside its own event loop
    names = {"__name__": "__main__"}
    *before, last = cells
    for cell in before:
        exec(cell, names)
    *lines, shown = last.splitlines()
    exec("\\n".join(lines), names)
    return eval(shown, names), names["trainer"].args.branches

table, branches = asyncio.run(kernel(json.loads(sys.argv[1])))
print(json.dumps([salesrl_trl.__file__, branches, table.to_dict("list")]))
"""


def test_the_notebook_trains_with_an_installed_package_where_an_event_loop_runs_already(tmp_path):
    (tmp_path / "tree").mkdir()
    installed = tmp_path / "site-packages"
    built_wheel(tmp_path / "tree").extractall(installed)
    cells = ["".join(cell["source"]) for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    assert sum("max_steps=40," in cell for cell in cells) == 1
    fewer = [cell.replace("max_steps=40,", "max_steps=10,") for cell in cells]
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [python(), "-c", KERNEL, json.dumps(fewer)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    file, branches, table = json.loads(ran.stdout.splitlines()[-1])
    assert (Path(file).parents[1], branches) == (installed, ["carry", "plain"])
    assert table["step"] == [5, 10]
    assert [name for name, column in table.items() if not all(map(math.isfinite, column))] == []
    stored = "".join(notebook()["cells"][-1]["outputs"][-1]["data"]["text/html"])
    assert list(table) == re.findall(r"<th>([^<]+)</th>", stored.partition("</thead>")[0])  # the index has no name


def embedded(request):
    """Counts of the pairs of neighbouring characters: texts are the nearer the more pairs they share."""
    vectors = []
    for text in request.json["input"]:
        vectors.append([0.001] * 512)
        for pair in zip(text.lower(), text.lower()[1:], strict=False):
            vectors[-1][zlib.crc32("".join(pair).encode()) % 512] += 1.0
    data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
    return Response(
        json.dumps({"object": "list", "model": "bigrams", "data": data[::-1]}), mimetype="application/json"
    )


@pytest.fixture
def vector_store(httpserver, tmp_path):
    """Start the example, perhaps with documents. Returns its address."""
    started = []

    def start(documents=None):
        port = ports.enter_context(held_port())
        environment = {"OPENAI_BASE_URL": httpserver.url_for("/embedder/v1"), "OPENAI_API_KEY": "k", "PORT": str(port)}
        if documents is not None:
            environment["DOCUMENTS"] = str(tmp_path / "documents.jsonl")
            (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)), "utf-8")
        started.append(
            subprocess.Popen([sys.executable, str(EXAMPLES / "vector_store.py")], env={**os.environ, **environment})
        )
        end = time.monotonic() + 60
        while time.monotonic() < end and started[-1].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return f"http://127.0.0.1:{port}"
            time.sleep(0.05)
        raise AssertionError("the example did not listen")

    httpserver.expect_request("/embedder/v1/embeddings", method="POST").respond_with_handler(embedded)
    with contextlib.ExitStack() as ports:
        yield start
    for process in started:
        process.terminate()
        process.wait()


def test_a_vector_store_answers_a_run_from_the_demos_knowledge(vector_store, services, tmp_path):
    services.verdict(json.dumps(VERDICT))
    completions = [action(query="How much does the watercolour course cost?", profile=""), "no action"]
    url, judge = vector_store(), {"judge_base_url": f"{services.url}/v1", "judge_model": "judge"}
    config = RewardConfig(rag_base_url=url, cache_answers=False, **judge)
    parts, rows = prepare_reward(config, ["fairness", "hallucination"]), [row("r1"), row("r2")]
    reward = build_reward(config, parts, rows, url, NOWHERE, output_dir=tmp_path)
    scored, invalid = score_batch(reward, completions, [0, 1]).rewards
    assert (scored.value, invalid.reason) == (0.75, "not_json")
    assert 0.2 < scored.components["retrieval"] < 1.0
    assert "atercolour" in services.asked["judge"][-1].json["messages"][1]["content"]


def test_a_tenant_of_a_vector_store_sees_its_own_documents_and_everybodys(vector_store, services, tmp_path):
    services.verdict(json.dumps(VERDICT))
    documents = [{"id": name, "text": f"The price of {name} is 100.", "tenant_id": name} for name in ("anna", "bert")]
    url = vector_store([*documents, {"id": "all", "text": "Everybody may know the hours."}])
    answers = {}
    for tenant in ("anna", "carl", ""):
        body = {"context": "The price of bert?", "tenant_id": tenant, "request_id": "i"}
        body |= {"score_threshold": 0.0, "top_k": 9}
        answers[tenant] = httpx2.post(f"{url}/v1/rag/32b", json=body).json()
    assert {tenant: sorted(each["id"] for each in answer["passages"]) for tenant, answer in answers.items()} == {
        "anna": ["all", "anna"], "carl": ["all"], "": ["all", "anna", "bert"]
    }  # fmt: skip
    assert answers[""]["answer"] == "The price of bert is 100."
