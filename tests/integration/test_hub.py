"""What leaves the machine for the hub: the policy with its card, and no customer's text, log or setting."""

import base64
import json
import logging
import re
from dataclasses import dataclass, field

import pytest
from datasets import Dataset
from huggingface_hub import ModelCard
from support.scripted import length, settings
from werkzeug import Request, Response

from salesrl_trl.checkpoint.whole import fault_of
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.parts.model_card import hub_name, public_command
from salesrl_trl.trainer import SalesGRPOTrainer

CUSTOMER = "Xanthippe"
ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{CUSTOMER} {place}"}]} for place in range(16)])
POLICY = {"README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
          "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
STATE = {"manifest.json", "made_of.json", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}


@dataclass
class Hub:
    repositories: dict[str, bool] = field(default_factory=dict)  # whether each is private
    commits: list[dict[str, bytes]] = field(default_factory=list)

    @property
    def files(self):
        """Names of all files that have arrived."""
        return sorted({name for commit in self.commits for name in commit})

    def answer(self, request: Request) -> Response:
        at, said = request.path, request.get_data()
        if at == "/api/repos/create":
            asked = json.loads(said)
            name = f"me/{asked['name']}"
            self.repositories[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return _json({"url": f"{request.host_url}{name}"})
        if at == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if "/preupload/" in at:
            files = json.loads(said)["files"]
            modes = {"uploadMode": "regular", "shouldIgnore": False}  # each in one request, without LFS
            return _json({"files": [{"path": file["path"], **modes} for file in files]})
        if "/commit/" in at:
            lines = [json.loads(line) for line in said.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            oid = f"{len(self.commits):040x}"
            return _json({"commitUrl": f"{request.host_url}me/policy/commit/{oid}", "commitOid": oid})
        return Response(status=404)


def _json(value):
    return Response(json.dumps(value), content_type="application/json")


def open_hub(monkeypatch, httpserver):
    """The hub, in place of the real one for this process."""
    hub = Hub()
    httpserver.expect_request(re.compile(".*")).respond_with_handler(hub.answer)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", httpserver.url_for("").rstrip("/"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    return hub


def trainer_of(policy, folder, **given):
    usual = {"beta": 0.0, "max_completion_length": 8, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    args = SalesGRPOConfig(**settings(folder, **{**usual, **given}))
    return SalesGRPOTrainer(str(policy), length, args, train_dataset=ROWS, eval_dataset=ROWS.select(range(4)))


def inside(folder, names):
    return {f"{folder}/{name}" for name in names}


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("end", set()),
        ("every_save", set()),
        ("checkpoint", inside("last-checkpoint", POLICY | STATE)),
        ("all_checkpoints", inside("checkpoint-1", POLICY | STATE) | inside("checkpoint-2", POLICY | STATE)),
    ],
)
def test_a_push_uploads_whole_policies_and_nothing_else_of_the_folder(
    tiny, tmp_path, monkeypatch, httpserver, caplog, strategy, more
):
    hub, folder = open_hub(monkeypatch, httpserver), tmp_path / "policy"
    caplog.set_level(logging.INFO, logger="salesrl_trl")
    trainer = trainer_of(
        tiny, folder, push_to_hub=True, hub_strategy=strategy, hub_always_push=True, save_total_limit=1, record=True,
        report_to="tensorboard", num_iterations=2, rollout_lookahead=1, save_rollouts=True, eval_on_start=True,
    )  # fmt: skip
    trainer.train()
    (_rollouts,) = folder.glob("checkpoint-2/rollouts_*.pt")  # tokens of prompts
    trainer.evaluate()
    trainer.save_model()
    trainer.finish()
    assert hub.repositories == {"me/policy": True}  # private
    assert len(hub.commits) == (1 if strategy == "end" else 3)
    assert all(commit.keys() >= POLICY for commit in hub.commits)
    assert set(hub.files) == POLICY | more
    assert all(CUSTOMER.encode() not in content for commit in hub.commits for content in commit.values())
    assert all(b"model_name: policy\n" in commit["README.md"] for commit in hub.commits)
    assert not [*folder.glob(".pushing-*")]
    assert "[Run] hub          policy (private, if new) gets weights, tokenizer" in caplog.text
    card = hub.commits[-1]["README.md"].decode()
    assert "# policy\n" in card and "mean reward changed by" in card and "| Reward | length, weight 1 |" in card
    assert str(tmp_path) not in card and ".saving" not in card
    assert "transformers" in ModelCard(card).data.to_dict().values()  # by which the hub offers code that loads it
    for name in {path.partition("/")[0] for path in more}:  # whole, so that a run can go on from it
        copy = tmp_path / "copy" / name
        copy.mkdir(parents=True)
        commit = next(commit for commit in reversed(hub.commits) if f"{name}/manifest.json" in commit)
        for path, content in commit.items():
            if path.startswith(f"{name}/"):
                (copy / path.partition("/")[2]).write_bytes(content)
        assert fault_of(copy) is None


def test_a_repository_is_public_and_a_readme_another_only_by_the_users_will(tiny, tmp_path, monkeypatch, httpserver):
    hub, folder = open_hub(monkeypatch, httpserver), tmp_path / "policy"
    folder.mkdir()
    (folder / "README.md").write_text("Our policy.")
    trainer = trainer_of(tiny, folder, hub_private_repo=False, save_strategy="no")
    trainer.train()
    trainer.push_to_hub(commit_message="done", blocking=False).result()  # `push_to_hub` is false in its settings
    trainer.finish()
    assert hub.repositories == {"me/policy": False}
    assert set(hub.files) == POLICY and hub.commits[0]["README.md"] == b"Our policy."


def test_a_card_quotes_of_a_command_what_can_be_no_secret():
    command = (
        "/home/ann/full.py --max_steps 4 --learning_rate=1e-5 --use_peft --judge_model gpt-5 --optim adamw_torch "
        "--judge_base_url http://10.0.0.7:8000/v1 --vllm_server_host gpu1 --hub_token hf_x --output_dir runs "
        '--branch_kl {"a":1} --rag_api_key_env=KEY --x 10.0.0.7 --dataset acme'
    )
    assert public_command(command.split()) == (
        "full.py --max_steps 4 --learning_rate=1e-5 --use_peft --judge_model ... --optim adamw_torch "
        "--judge_base_url ... --vllm_server_host ... --hub_token ... --output_dir ... "
        "--branch_kl ... --rag_api_key_env=... --x ... --dataset ..."
    )
    names = map(hub_name, ("Qwen/Qwen3-8B", "/data/acme/policy", "runs/a/best"))
    assert [*names] == ["Qwen/Qwen3-8B", "policy", "best"]
