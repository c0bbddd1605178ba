"""The real model of `benchmarks.real_model_files` sells to itself: `recipes/dialogue.py` with it as the policy, and
with its first weights as the customer, over vLLM's server.

    python -m benchmarks.real_model_dialogue OUT [--model FOLDER] [--steps 200] [--SETTING VALUE ...]

- A base model has no roles: each side's chat template shows a short conversation first, and a line for each message.
  Turns end with the line. There are no tools. Offers are in yuan, because this customer copies the number of an
  offer: of "20 percent off" it made a price of 20.
- The server's `response_format` holds the customer to the form of a reply, but not to its role. The embedded judge
  scores conversations, as in the recipe.
- It prints the held-out lines before and after, with eight conversations, and how conversations ended. The run is in
  `OUT/run`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser
from benchmarks.real_model_files import prepare
from benchmarks.real_model_sales import KV_BYTES, RECIPES, check_launch, log_of, words_of
from benchmarks.vllm_server import vllm_server

SELLER = """{{ bos_token }}A seller of courses talks to a customer.

Customer: Hello, I'd like to take the yoga course. The price should be fair.
Seller: I can offer you yoga at 2600 yuan.
Customer: That is too much for me.
Seller: I can offer you yoga at 1900 yuan.
Customer: Good, I take it.

{% for message in messages %}
{{ 'Seller:' if message['role'] == 'assistant' else 'Customer:' }} {{ message['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}
Seller:
{%- endif %}"""
CUSTOMER = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ message['content'] }}

Seller: I can offer you the chair at 95 yuan.
Customer: {"reply": "That is too much for me.", "decision": "continue", "price": null}
Seller: I can offer you the chair at 70 yuan. It has wheels.
Customer: {"reply": "Good, I take it.", "decision": "accept", "price": 70}

{% else %}
{{ 'Seller:' if message['role'] == 'user' else 'Customer:' }} {{ message['content'] | trim }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
Customer:
{%- endif %}"""
TEMPLATES = {"seller": SELLER, "customer": CUSTOMER}
REPLY = {
    "type": "object", "required": ["reply", "decision", "price"], "additionalProperties": False,
    "properties": {
        "reply": {"type": "string", "minLength": 2, "maxLength": 160},
        "decision": {"enum": ["continue", "accept", "refuse"]},
        "price": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9999}, {"type": "null"}]},
    },
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "tools": [], "max_completion_length": 512, "vllm_max_model_length": 1024, "vllm_gpu_memory_utilization": 0.12,
    "vllm_engine_kwargs": {"kv_cache_memory_bytes": KV_BYTES},
    "learning_rate": 2e-6, "dtype": "float32", "quick_eval_steps": 0, "save_strategy": "no",
    "held_out_examples": 8,
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Train, and print what became of it."""
    made = parser(__doc__)
    made.add_argument("out", type=Path)
    made.add_argument("--model", type=Path, help="folder of the model; by default it is fetched into OUT")
    made.add_argument("--steps", type=int, default=200)
    args, further = made.parse_known_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    model, run = args.model or prepare(args.out / "model"), args.out / "run"
    sides = {name: with_template(model, args.out / name, text) for name, text in TEMPLATES.items()}
    generation = sides["customer"] / "generation_config.json"  # xgrammar rejects a line's end as the text's
    config = json.loads(generation.read_text()) | {"eos_token_id": 1}
    generation.unlink()
    generation.write_text(json.dumps(config))
    options = ["--served-model-name", "self", "--gpu-memory-utilization", "0.12", "--max-model-len", "2048",
               "--kv-cache-memory-bytes", str(KV_BYTES),
               "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']  # fmt: skip
    options += [] if torch.cuda.is_available() else ["--enforce-eager"]  # compiling takes minutes on a CPU
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": REPLY}}
    partner = {"kind": "customer", "base_url": "http://127.0.0.1/v1", "model": "self", "max_completion_tokens": 96,
               "timeout_s": 120, "extra_body": {"response_format": form}}  # fmt: skip
    settings = SETTINGS | {
        "model_name_or_path": sides["seller"], "output_dir": run, "max_steps": args.steps, "partner": partner,
    }  # fmt: skip
    check_launch(settings, "dialogue", further)
    with vllm_server(sides["customer"], args.out / "customer.txt", *options) as url:
        settings["partner"] = partner | {"base_url": f"{url}/v1"}
        command = [sys.executable, str(RECIPES / "dialogue.py"), *words_of(settings)]
        subprocess.run([*command, *further], check=True)
    report(run)


def with_template(model: Path, folder: Path, template: str) -> Path:
    """A folder with the model's files and this chat template."""
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def report(run: Path) -> None:
    print("\n".join(line for line in (run / "run.log").read_text().splitlines() if "held-out " in line))
    steps = log_of(run)
    print(f"{len(steps)} steps, {steps[-1]['at_s'] / max(len(steps) - 1, 1):.1f} s each")
    for name in ("dialogue/agreement", "dialogue/refusal", "dialogue/length", "dialogue/failed", "dialogue/turns"):
        print(name, *(f"{step.get(name, float('nan')):.2f}" for step in steps))


if __name__ == "__main__":
    main()
