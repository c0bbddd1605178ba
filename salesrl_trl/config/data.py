"""The rows of a run. Owns where they come from, how many are taken, and how they are prompted."""

from dataclasses import dataclass, field

from salesrl_trl.config.checks import about, check, check_choice
from salesrl_trl.data.lengths import LONG_PROMPT_RULES
from salesrl_trl.data.prompts import PROMPT_STYLES


@dataclass
class DataConfig:
    """The rows to train and evaluate on.

    Args:
        dataset (`str`, *optional*, defaults to `"demo"`):
            `demo`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
        train_split (`str`, *optional*, defaults to `"train"`):
            Split to train on.
        eval_dataset (`str`, *optional*):
            Where the held-out rows come from; the same as `dataset` when not given.
        eval_split (`str`, *optional*, defaults to `"heldout"`):
            Split to evaluate on.
        max_train_rows (`int`, *optional*):
            Take the first so many training rows.
        max_eval_rows (`int`, *optional*):
            Take the first so many held-out rows.
        prompt_style (`str`, *optional*, defaults to `"instruct"`):
            `instruct` explains the task to a general chat model, `compact` is the bare conversation.
        prompt_template (`str`, *optional*):
            File with a prompt of one's own, in place of `prompt_style`: a Jinja template with the row's fields, which
            docs/DATA.md lists.
        max_prompt_tokens (`int`, *optional*):
            Most tokens of a prompt, the chat template's included. When not given, all that `vllm_max_model_length`,
            or without it the model, has room for beside `max_completion_length`.
        long_prompts (`str`, *optional*, defaults to `"error"`):
            What becomes of rows whose prompts are longer: `error` ends the run before a model is loaded, `drop` leaves
            the rows out, `truncate_oldest_turns` leaves their oldest turns out of the prompt.
    """

    dataset: str = field(default="demo", metadata=about("demo, a local file or a dataset on the hub"))
    train_split: str = field(default="train", metadata=about("split to train on"))
    eval_dataset: str | None = field(
        default=None, metadata=about("source of held-out rows; as `dataset` if not given")
    )
    eval_split: str = field(default="heldout", metadata=about("split to evaluate on"))
    max_train_rows: int | None = field(default=None, metadata=about("take the first so many training rows"))
    max_eval_rows: int | None = field(default=None, metadata=about("take the first so many held-out rows"))
    prompt_style: str = field(default="instruct", metadata=about("instruct or compact"))
    prompt_template: str | None = field(default=None, metadata=about("Jinja file with a prompt of one's own"))
    max_prompt_tokens: int | None = field(default=None, metadata=about("most tokens of a prompt"))
    long_prompts: str = field(default="error", metadata=about("error, drop or truncate_oldest_turns"))

    def __post_init__(self) -> None:
        check_choice(self, "prompt_style", PROMPT_STYLES)
        check_choice(self, "long_prompts", LONG_PROMPT_RULES)
        for name, otherwise in (
            ("max_train_rows", "for all rows"),
            ("max_eval_rows", "for all rows"),
            ("max_prompt_tokens", "for what the model has room for"),
        ):
            value = getattr(self, name)
            check(value is None or value > 0, f"`{name}` is {value}. Expected at least 1, or nothing {otherwise}.")
