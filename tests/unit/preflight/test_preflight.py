"""A preflight tells every fault that it knows, and the start of a run tells the same one in the same words."""

import functools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from check_gpu_memory import main as check_memory
from support.forked import python
from support.published import qrecc, write
from transformers import AutoTokenizer

from salesrl_trl.errors import SalesRLError
from salesrl_trl.ground import versions
from salesrl_trl.launch import software
from salesrl_trl.launch.checks import environment
from salesrl_trl.launch.checks.addresses import PROBE_TIMEOUT_S
from salesrl_trl.launch.checks.outcome import StageVerdict
from salesrl_trl.launch.data import sources
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight import runner
from salesrl_trl.launch.preflight.__main__ import main
from salesrl_trl.launch.preflight.runner import chosen, examine, prepare
from salesrl_trl.launch.preflight.stage import PreflightStage
from salesrl_trl.launch.settings import parse
from salesrl_trl.launch.software import Card

RECIPE = Path(__file__).parents[3] / "recipes/debug.yaml"
CHEAP = runner.STAGES[:4]  # those that ask no service and load no model


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(runner, "BEFORE_A_RUN", CHEAP)
    monkeypatch.setattr("salesrl_trl.launch.console.set_up_logging", lambda *_: None)


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The messages of a preflight, which are those of a run's start."""

    def messages(*arguments, stages=CHEAP):
        given = ["--output_dir", str(tmp_path / "run"), *map(str, arguments)]
        monkeypatch.setattr(runner, "BEFORE_A_RUN", stages)
        ends = False
        try:
            in_a_run = prepare(parse(given, RECIPE)).notes
        except SalesRLError as error:
            in_a_run, ends = [str(error)], True
        try:
            reports = list(examine(Plan(parse(given, RECIPE), in_depth=True), stages))
            found = [finding for report in reports for finding in report.findings]
            is_failure = [report.verdict is StageVerdict.FAILED for report in reports]
            assert is_failure == [False] * (len(reports) - 1) + [any(each.is_failure for each in found)]
            in_preflight = [each.message for each in found]
            compared = [each.message for each in found if each.is_failure or not ends]  # an error hides a run's notes
        except SalesRLError as error:
            in_preflight = compared = [str(error)]
        assert in_a_run == compared
        return "\n".join(in_preflight)

    return messages


def packages(monkeypatch, **installed):
    real = versions.installed
    for module in (versions, environment):
        monkeypatch.setattr(module, "installed", lambda name: installed[name] if name in installed else real(name))


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"trl": "1.15.3"}, "trl is 1.15.3, and trl<1.17,>=1.16.0 is required. Run `pip install"),
        ({"trl": "dev"}, "trl is dev, and trl<1.17,>=1.16.0 is required."),  # raised with packaging 24.2
        ({"numpy": None}, "numpy is not installed, and numpy"),
        ({"vllm": None}, "vLLM is not installed. Run scripts/install.sh, or set `use_vllm: false`"),
    ],
)
def test_versions_are_held_against_the_pins(told, monkeypatch, installed, message):
    packages(monkeypatch, **installed)
    assert message in told(stages=CHEAP[:1])


OPTIMIZERS = "transformers.trainer_optimizer."


@pytest.mark.parametrize(
    ("known", "message", "arguments"),
    [
        (
            environment.__name__ + ".is_liger_kernel_available",
            "Run `pip install liger-kernel`",
            "--use_liger_kernel true",
        ),
        (OPTIMIZERS + "is_torchao_available", "`optim` is adamw_torch_4bit. You need", "--optim adamw_torch_4bit"),
        (OPTIMIZERS + "is_bitsandbytes_available", "`optim` is paged_adamw_32bit. You", "--optim paged_adamw_32bit"),
    ],
)
def test_a_package_that_a_setting_needs_is_missed_before_a_model_is_loaded(
    told, monkeypatch, known, message, arguments
):
    monkeypatch.setattr(known, lambda *_: False)
    assert told(stages=CHEAP[:1]) == ""
    assert message in told(*arguments.split(), stages=CHEAP[:1])


def test_an_optimizer_that_is_made_from_the_model_is_no_finding(told, monkeypatch):
    monkeypatch.setattr(OPTIMIZERS + "is_lomo_available", lambda: True)
    assert told("--optim", "lomo", stages=CHEAP[:1]) == ""


def test_disk_and_shared_memory_have_room(told, monkeypatch, tmp_path):
    free = {"disk": 0.5, "shm": 8.0}
    real, shared = shutil.disk_usage, environment.SHARED_MEMORY
    usage = lambda path: real(path)._replace(free=free["shm" if path == shared else "disk"] * 2**30)  # noqa: E731
    monkeypatch.setattr("shutil.disk_usage", usage)
    assert "has 0.50 GiB of free disk. Expected at least 1. Free some, or use" in told(stages=CHEAP[:1])
    free.update(disk=50, shm=0.05)
    assert told(stages=CHEAP[:1]) == ""  # nothing uses it
    workers = ["--dataloader_num_workers", "2"]
    assert "/dev/shm, used by several processes and `dataloader_num_workers`, has 0.05 GiB free" in told(*workers)
    free["shm"] = 0.5
    assert "Start the container with `--shm-size 8g`" in told(*workers, stages=CHEAP[:1])


def test_a_gpu_that_torch_cannot_use_is_told(told, monkeypatch):
    monkeypatch.setattr(software, "gpus", lambda: [{"driver_version": "470.1"}])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if not torch.cuda.is_available():
        assert "can't use the 1 GPUs of driver 470.1" in told(stages=CHEAP[:1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--temperature 1e9", "`temperature` is 1000000000.0. Expected a number, above 0 and at most 10: above"),
        ('--branch_kl {"fairness":{"beta":1e9}}', "`branch_kl.fairness.beta` is 1000000000.0. Expected"),
        ("--use_peft true --lora_dropout 2", "`lora_dropout` is 2.0. Expected a number, at least 0 and below"),
        ("--lora_r 4 --use_dora true", "without effect: lora_r, use_dora, because `use_peft` is false"),
        ("--max_steps 0", "or -1 to use `num_train_epochs`. Without updates: `mode: rollouts` generates"),
    ],
)
def test_settings_that_cannot_work_or_have_no_effect_are_told_with_advice(told, arguments, message):
    assert message in told(*arguments.split(), stages=CHEAP[:2])


A_PROMPT = ("--per_device_train_batch_size", "8")  # in a step


def rows(path, *texts):
    lines = [{"branch": "fairness", "conversation": [{"role": "customer", "content": text}]} for text in texts]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_rows_that_come_twice_or_are_evaluated_on_are_told(told, tmp_path):
    train, held_out = rows(tmp_path / "a.jsonl", "one", "two", "four"), rows(tmp_path / "b.jsonl", "two", "three")
    found = told("--dataset", train, "--eval_dataset", held_out, "--allow_stand_ins", "true", *A_PROMPT)
    assert "1 of 2 held-out rows are also training rows" in found
    assert "No training row belongs to hallucination. Add rows" in found and "No held-out row belongs to hall" in found


def test_records_of_a_published_dataset_are_read_once_counted_and_parted(told, tmp_path, monkeypatch):
    read = Mock(side_effect=sources.read_file)
    monkeypatch.setattr(sources, "read_file", read)
    lines = [qrecc(number, 1, question=f"What is {number}?") for number in range(8)]
    file = write(tmp_path / "qrecc.json", *lines, qrecc(8, 1, question="And who?", Answer=""))
    known = write(tmp_path / "known.jsonl", {"id": "d1", "text": "They are quiet."})
    given = ["--dataset", file, "--dataset_format", "qrecc", "--knowledge_file", known, *A_PROMPT]
    found = told(*given, "--held_out_share", "0.5", "--columns", '{"branch": {"value": "fairness"}}')
    assert read.call_count == 2  # once by a run, once by a preflight
    assert f"1 of 9 records of {file} are excluded: 1 have no known answer" in found
    assert "No training row belongs to hallucination. Add rows" in found and "No held-out row belongs to hall" in found
    assert "have the text of a training row" not in found
    assert f"10% of the rows of {file} are held out" in told(*given)
    found = told(*given, "--held_out_share", "0.5", "--columns", '{"branch": "kind"}')
    assert "lacks the column 'kind', which `columns` maps to 'branch'." in found


@pytest.fixture
def policy(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "policy"))


def asked(policy):
    lengths = ["--vllm_max_model_length", "128", "--max_completion_length", "16", "--long_prompts", "drop"]
    return ["--model_name_or_path", policy, "--prompt_template", "compact", *lengths, "--max_train_rows", "40"]


TURNS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}END\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TURNS.replace("END", "<|endoftext|>") + PROMPT, "ends a turn with <|endoftext|>, but only"),
        (TURNS.replace("END", "") + PROMPT, "ends a turn with no special token, but only"),
    ],
    ids=["other end", "no end"],
)
def test_a_template_ends_turns_with_an_end_token_and_begins_the_answer(told, policy, template, message):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(policy)
    assert message in told(*asked(policy))


def test_a_line_break_that_ends_a_completion_is_named_in_one_line(told, policy):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens(["\n"])
    tokenizer.chat_template = TURNS.replace("END\n", " ") + PROMPT
    tokenizer.save_pretrained(policy)
    ends = {"eos_token_id": tokenizer.convert_tokens_to_ids("\n")}
    (policy / "generation_config.json").write_text(json.dumps(ends))
    assert r"but only <|im_end|>, \n ends a completion" in told(*asked(policy))


def test_a_model_whose_files_contradict_each_other_is_refused(told, policy):
    (policy / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.7}))
    assert "refuses to save such a model" in told(*asked(policy))


def test_rows_with_special_tokens_and_a_tokenizer_without_an_end_are_named_before_a_run(told, policy, tmp_path):
    file = rows(tmp_path / "rows.jsonl", "Hi", "Hi<|im_end|>", "1 < 2")
    found = told("--dataset", file, "--eval_dataset", file, "--allow_stand_ins", "true", *asked(policy), *A_PROMPT)
    assert "such as <|im_end|>, which end or begin a turn in the prompt: row-1, held-out" in found
    path = policy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    assert "lacks an end token, which TRL needs to find the end of a completion" in told(*asked(policy))


def test_checkpoints_have_room(told, policy, monkeypatch):
    monkeypatch.setattr("salesrl_trl.launch.memory_estimate.parameter_count", lambda *_: 2**30)
    given = [*asked(policy), "--save_strategy", "steps", "--save_steps", "10", "--max_steps", "70"]
    free = {"gib": 200.0}
    monkeypatch.setattr("salesrl_trl.launch.preflight.memory.free_gib", lambda *_: free["gib"])
    monkeypatch.setattr("salesrl_trl.launch.software.card_here", lambda device: Card("a card", 80.0))
    asked_with = functools.partial(told, *given, stages=runner.STAGES[1:5])
    assert "free disk" not in asked_with()
    free["gib"] = 20.0
    assert "about 12.0 GiB" in asked_with()
    assert "free disk" not in asked_with("--save_only_model", "true")
    free["gib"] = 3.0
    # 2 bytes a weight, and two moments of a byte with a scale of 4 bytes for 256 numbers
    rounded = ["--dtype", "bfloat16", "--optim", "adamw_torch_8bit", "--optim_args", "bf16_stochastic_round=True"]
    assert "about 4.0 GiB" in asked_with(*rounded)


def test_a_named_stage_runs_after_those_it_needs_and_is_reported_alone():
    ran, broken = [], set()

    def stage(name, *needs):
        def check(plan, findings):
            ran.append(name)
            if name in broken:
                findings.fail("It is broken.", "Mend it.")

        return PreflightStage(name, needs, (check,))

    plan, stages = Plan(parse([], RECIPE)), (stage("a"), stage("b", "a"), stage("c"), stage("d", "b"))

    def examined(*wanted):
        ran.clear()
        return [report.stage for report in examine(plan, chosen(wanted, stages), wanted)]

    assert (examined("d"), ran) == (["d"], ["a", "b", "d"])
    assert examined("c", "b") == ["b", "c"]
    broken.add("a")
    assert (examined("d"), ran) == (["a"], ["a"])


def test_columns_of_several_kinds_are_told_before_a_model_is_loaded(told, tmp_path):
    def file(name, label):
        return write(tmp_path / f"{name}.jsonl", {"prompt": [{"role": "user", "content": name}], "label": label})

    entries = [{"path": file("a", 1), "eval": file("c", 1)}, {"path": file("b", "x"), "eval": file("d", "x")}]
    given = ("--dataset", json.dumps(entries), "--reward_funcs", "seams.own_reward.shortness")
    given += ("--prompt_template", "compact")
    assert "(line 1 of its file): the column `label` has str of length 1" in told(*given, *A_PROMPT)


def test_the_command_says_what_to_do_next_and_ends_with_2_for_a_failure(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "STAGES", CHEAP)
    given = ["--config", str(RECIPE), "--output_dir", str(tmp_path)]
    assert main(["--stage", "data", "--json", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], [each["stage"] for each in found["stages"]]) == (True, ["data"])
    assert found["stages"][0]["figures"]["train_rows"] == 960
    assert main(["--dataset", "absent.jsonl", *given]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["environment", "passed"]
    assert any("there is no dataset file absent.jsonl" in line for line in lines)
    assert lines[-1].startswith("Stage config failed after ")
    assert main(["--stage", "dat", *given]) == 2
    assert "`stage` is 'dat'. Expected some of: environment, config" in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "told"), [("0", 1), ("1", 0)])
def test_the_first_process_prints_one_json_object_whatever_libraries_print(capsys, tmp_path, monkeypatch, rank, told):
    def check(plan, findings):
        print("a line of another library")
        findings.figures["kl"] = math.nan

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(runner, "STAGES", (PreflightStage("chatty", (), (check,)),))
    assert main(["--json", "--config", str(RECIPE), "--output_dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["passed"] for line in lines] == [True] * told


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        (main, ["--stage"], "invalid arguments: argument --stage: expected one argument"),
        (main, ["--stage", "judge", "--config", "absent.yaml"], "there is no recipe absent.yaml. Expected a YAML"),
        (main, ["--max_stepz", "1"], "unknown arguments: --max_stepz (did you mean --max_steps?)"),
        (main, ["recipes/full.yaml", "--max_steps", "1"], "`recipes/full.yaml` belongs to no setting"),
        (main, ["--config", "BROKEN"], "is not YAML"),
        (check_memory, [], "no model is set, and the built-in small policy fits every GPU"),
        (check_memory, ["--model_name_or_path", "BROKEN"], "BROKEN"),
    ],
)
def test_a_program_gets_one_json_object_of_a_failure_too(tool, arguments, message, capsys, tmp_path):
    (tmp_path / "BROKEN").write_text("a: [")
    given = [str(tmp_path / each) if each == "BROKEN" else each for each in arguments]
    assert tool(["--json", *(["--card", "80gb"] if tool is check_memory else []), *given]) == 2
    told = json.loads(capsys.readouterr().out)
    found = told["stages"][0]["findings"][0] if tool is main else told["failure"]
    assert message in found["text"]


def preflight(*arguments, **options):
    command = [python(), "-m", "salesrl_trl.launch.preflight", "--config", str(RECIPE), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)  # a fork heeds Ctrl-C again


def test_a_reader_that_ends_early_ends_a_preflight_without_a_traceback():
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does after its lines
    with preflight("--stage", "rag", "--rag.base_url", "http://127.0.0.1:9", stdout=writing) as run:
        os.close(writing)
        told = run.communicate(timeout=120)[1]
    assert run.returncode == 128 + signal.SIGPIPE
    assert "Error" not in told


def test_ctrl_c_ends_a_preflight_with_130_and_without_a_traceback():
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes the connection and does not answer
        address = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with preflight("--stage", "rag", "--rag.base_url", address, stdout=subprocess.PIPE) as run:
            connection, _ = mute.accept()
            run.send_signal(signal.SIGINT)
            interrupted = time.monotonic()
            said, told = run.communicate(timeout=60)
        connection.close()
    assert time.monotonic() - interrupted < PROBE_TIMEOUT_S  # it does not wait for the answer
    assert (run.returncode, said, told) == (130, "", "\ninterrupted by Ctrl-C\n")
