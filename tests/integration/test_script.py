"""A script of a user's own, with the two names of TRL changed, has what a recipe has."""

import logging
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from support.scripted import length, settings, steps_of
from transformers import AutoModelForCausalLM

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.ground import process, versions
from salesrl_trl.record.reader import recorded
from salesrl_trl.record.report import read_run
from salesrl_trl.trainer import SalesGRPOTrainer

ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Question {place}"}]} for place in range(16)])


def train(policy, folder, resume=None, reward=length, **given):
    usual = {"beta": 0.0, "max_completion_length": 8, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = SalesGRPOConfig(**settings(folder, **{**usual, **given}))
    trainer = SalesGRPOTrainer(str(policy), reward, args, train_dataset=ROWS)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.finish()
    return trainer


def test_a_resume_says_from_where_and_its_own_steps_between_lines_and_checkpoints_hold(
    tiny, tmp_path, caplog, monkeypatch
):
    imported = sys.modules["salesrl_trl.trainer"].__spec__, b"the hash of an older file"
    monkeypatch.setitem(process._imported, "salesrl_trl.trainer", imported)  # as in a kernel that was not restarted
    train(tiny, tmp_path)
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        later = train(tiny, tmp_path, resume=True, max_steps=8, logging_steps=2, save_steps=3)
    assert "resuming from checkpoint-2, step 2 of 8" in caplog.text
    assert caplog.text.count("salesrl_trl.trainer: the file has changed since this process imported it") == 1
    assert [line["step"] for line in steps_of(later)] == [1, 2, 4, 6, 8]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 3, 6, 8)]


def test_a_script_has_a_banner_and_a_record_that_goes_on_after_a_resume(tiny, tmp_path, caplog, monkeypatch):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "9.9" if name == "peft" else real(name))
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        train(tiny, tmp_path, max_steps=3, record=True, report_to="tensorboard")
        banner = [record.getMessage() for record in caplog.records if record.getMessage().startswith("[Run]")]
        train(tiny, tmp_path / "other", rollout_lookahead=1, max_staleness=3)
        train(tiny, tmp_path, resume=str(tmp_path / "checkpoint-2"), max_steps=4, record=True)
    assert '"figures"' in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "other/report.html").exists() and "report       off: it requires" in caplog.text
    names = [line.split()[1] for line in banner]
    assert names == ["reward", "step", "rollouts", "branch", "budget", "version", "record", "report", "output"]
    assert f"length: at {length.__code__.co_filename}" in banner[0]
    assert caplog.text.count("peft is 9.9, and peft<1,>=0.20.0 is required. Other versions are untested") == 3
    # two prompts of two completions a step; step 3 of the first run is gone, and was done again
    assert [each.step for each in recorded(tmp_path)] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    assert "record       off: completions are not kept" in caplog.text
    assert "`max_staleness` is ignored" in caplog.text and "groups that are scored first" not in caplog.text
    train(tiny, tmp_path, max_steps=1, record=True)  # another run in this folder
    train(tiny, tmp_path, resume=str(tmp_path / "run-1/checkpoint-4"), max_steps=6, record=True)
    assert [each.step for each in recorded(tmp_path)] == [step for step in (5, 6) for _ in range(4)]
    assert len([*tmp_path.glob("run-[12]/record/rank-0.sqlite")]) == 2
    assert not (tmp_path / "other/record").exists()


def test_a_second_run_of_a_trainer_is_not_mixed_with_the_first(tiny, tmp_path):
    given = {"report_to": "tensorboard", "eval_on_start": True, "record": True, "log_completions": True}
    args = SalesGRPOConfig(**settings(tmp_path, beta=0.0, max_completion_length=8, max_steps=2, **given))
    trainer = SalesGRPOTrainer(str(tiny), length, args, train_dataset=ROWS, eval_dataset=ROWS.select(range(4)))
    trainer.train()
    trainer.evaluate()  # TensorBoard's file is open again
    trainer.save_model()
    trainer.train()
    trainer.finish()
    (tmp_path / "run-1").rename(tmp_path / "run-7")
    first, second = read_run(tmp_path / "run-7"), read_run(tmp_path)
    assert [[*run.of("reward")] for run in (first, second)] == [[1, 2]] * 2
    assert not (tmp_path / "model.safetensors").exists()
    assert ([*first.held_out], [*second.held_out]) == ([0, 2], [0])
    for folder in (tmp_path, tmp_path / "run-7"):
        assert len([*recorded(folder)]) == 8 + 4 * 2 * len(read_run(folder).held_out)
        assert (folder / "trace.json").is_file() and not (folder / "trace-1.json").exists()
    assert len([*(tmp_path / "completions").glob("*.parquet")]) == 3  # of steps 0 to 2


def test_an_adapter_saved_where_a_whole_policy_lay_comes_upon_its_own_base(tiny, tmp_path):
    def save(**given):
        args = SalesGRPOConfig(**settings(tmp_path / "run", beta=0.0, max_completion_length=8, max_steps=1))
        trainer = SalesGRPOTrainer(str(tiny), length, args, train_dataset=ROWS, **given)
        trainer.train()
        trainer.save_model(str(tmp_path / "policy"))
        trainer.finish()

    save()
    save(peft_config=LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    name = "model.layers.0.self_attn.q_proj"
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "policy").named_parameters())
    base = dict(AutoModelForCausalLM.from_pretrained(tiny).named_parameters())
    assert torch.equal(found[f"{name}.base_layer.weight"], base[f"{name}.weight"])
    assert "| Trained | a LoRA adapter |" in (tmp_path / "policy/README.md").read_text()


def test_a_report_that_can_not_be_written_ends_no_run_and_is_told(tiny, tmp_path, caplog):
    (tmp_path / "report.html").mkdir(parents=True)
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        assert train(tiny, tmp_path, report_to="tensorboard").state.global_step == 2
    assert "writing the report failed (IsADirectoryError)" in caplog.text
