"""Settings of the rows: their source, their number and their prompt."""

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
            Source of the held-out rows. Defaults to `dataset`.
        eval_split (`str`, *optional*, defaults to `"heldout"`):
            Split to evaluate on.
        data_copy_dir (`str`, *optional*):
            Folder on a faster disk. `dataset`, `eval_dataset` and `vector_store_path`, where they are local, are
            copied there once and read from there. Rows are read once a start, a vector store all through the run.
        max_train_rows (`int`, *optional*):
            Number of training rows to take, from the first one on. Defaults to all.
        max_eval_rows (`int`, *optional*):
            Number of held-out rows to take, from the first one on. Defaults to all.
        prompt_style (`str`, *optional*, defaults to `"instruct"`):
            `instruct` explains the task to a general chat model. `compact` is the conversation alone.
        prompt_template (`str`, *optional*):
            File with a prompt of your own, instead of `prompt_style`: a Jinja template with the row's fields.
            docs/DATA.md lists them.
        max_prompt_tokens (`int`, *optional*):
            Most tokens of a prompt, the chat template's included. Defaults to `vllm_max_model_length`, or without it
            the model's positions, less `max_completion_length`.
        long_prompts (`str`, *optional*, defaults to `"error"`):
            Rule for rows with longer prompts. `error` ends the run before a model is loaded. `drop` leaves these rows
            out. `truncate_oldest_turns` leaves their oldest turns out of the prompt.
    """

    dataset: str = field(default="demo", metadata=about("Rows: `demo`, a local file, or a dataset on the hub."))
    train_split: str = field(default="train", metadata=about("Split to train on."))
    eval_dataset: str | None = field(default=None, metadata=about("Source of the held-out rows; default: `dataset`."))
    eval_split: str = field(default="heldout", metadata=about("Split to evaluate on."))
    data_copy_dir: str | None = field(
        default=None, metadata=about("Folder on a faster disk, for copies of local rows and vector store.")
    )
    max_train_rows: int | None = field(default=None, metadata=about("Number of training rows to take; default: all."))
    max_eval_rows: int | None = field(default=None, metadata=about("Number of held-out rows to take; default: all."))
    prompt_style: str = field(default="instruct", metadata=about("Packaged prompt: `instruct` or `compact`."))
    prompt_template: str | None = field(default=None, metadata=about("Jinja file with a prompt of your own."))
    max_prompt_tokens: int | None = field(default=None, metadata=about("Longest prompt, in tokens."))
    long_prompts: str = field(
        default="error", metadata=about("Rule for longer prompts: `error`, `drop` or `truncate_oldest_turns`.")
    )

    def __post_init__(self) -> None:
        check_choice(self, "prompt_style", PROMPT_STYLES)
        check_choice(self, "long_prompts", LONG_PROMPT_RULES)
        for name, otherwise in (
            ("max_train_rows", "for all rows"),
            ("max_eval_rows", "for all rows"),
            ("max_prompt_tokens", "for the longest that the model has room for"),
        ):
            value = getattr(self, name)
            check(value is None or value > 0, f"`{name}` is {value}. Expected at least 1, or nothing {otherwise}.")

    @property
    def own_sources(self) -> list[str]:
        """The datasets of the run that are not the demo."""
        return [each for each in (self.dataset, self.eval_dataset) if each is not None and each != DataConfig.dataset]
