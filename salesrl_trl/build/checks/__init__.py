"""Checks before a model's weights are loaded, one module for each thing that is checked.

- `folders`: the output folder, and the checkpoint to resume from.
- `prompts`: the prompt's template, and the room for prompt and completion.
- `model`: the model's configuration, tokenizer and size.
- `reward`: rubrics, weights, keys and addresses of the reward's services.
- `addresses`: requests to configured addresses. Only this module uses the network, and `model` for a model on the hub.

Each check raises a `SalesRLError` that says what was got, what was expected and what to do. Refuses to decide the
order of the checks: `preflight` does. A setting by itself is checked in `config`, a row in `data`.
"""
