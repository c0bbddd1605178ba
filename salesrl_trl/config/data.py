"""Settings of the rows: their source, their number and their prompt."""

from dataclasses import dataclass, field
from pathlib import Path

from salesrl_trl.config.checks import about, build_object, check, check_choice, check_types, structure
from salesrl_trl.data.columns import Column, read_columns
from salesrl_trl.data.demo_pictures import DEMO_PICTURES
from salesrl_trl.data.files import ENDINGS
from salesrl_trl.data.form import Form
from salesrl_trl.data.formats import FORMATS, ROWS, DatasetFormat
from salesrl_trl.data.lengths import LONG_PROMPT_RULES
from salesrl_trl.data.prompts import PROMPT_STYLES


@dataclass
class DataConfig:
    """The rows to train and evaluate on.

    Args:
        dataset (`str`, *optional*, defaults to `"demo"`):
            `demo`, `demo_pictures`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
        train_split (`str`, *optional*, defaults to `"train"`):
            Split to train on.
        eval_dataset (`str`, *optional*):
            Source of the held-out rows. Defaults to `dataset`.
        eval_split (`str`, *optional*, defaults to `"heldout"`):
            Split to evaluate on.
        dataset_format (`str`, *optional*, defaults to `"rows"`):
            `rows` have this package's columns. `bbq`, `halueval`, `qrecc` and `topiocqa` are published datasets in
            their own files. The dotted path of a class that derives from `DatasetFormat` is a format of your own.
        eval_dataset_format (`str`, *optional*):
            Format of `eval_dataset`. Defaults to `dataset_format`.
        columns (`dict`, *optional*):
            For a field of the row the column that holds it, or `{value: CONSTANT}`. docs/DATA.md lists the fields.
        eval_columns (`dict`, *optional*):
            Columns of `eval_dataset`. Defaults to `columns`.
        held_out_share (`float`, *optional*, defaults to `0.0`):
            Share of the conversations of `dataset` to evaluate on and not to train on, in place of `eval_dataset`.
        image_folder (`str`, *optional*):
            Folder from which relative paths of pictures start. Defaults to the folder of the data file.
        data_copy_dir (`str`, *optional*):
            Folder on a faster disk. `dataset` and `eval_dataset`, where they are local, are copied there once and
            read from there.
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
    dataset_format: str = field(
        default=ROWS,
        metadata=about(f"`{ROWS}`, {', '.join(f'`{name}`' for name in FORMATS)}, or a class's dotted path."),
    )
    eval_dataset_format: str | None = field(
        default=None, metadata=about("Format of `eval_dataset`; default: `dataset_format`.")
    )
    columns: dict[str, object] | str | None = field(
        default=None, metadata=about('Columns of the fields of a row, as JSON: {"conversation": "messages"}.')
    )
    eval_columns: dict[str, object] | str | None = field(
        default=None, metadata=about("Columns of `eval_dataset`; default: `columns`.")
    )
    held_out_share: float = field(
        default=0.0, metadata=about("Share of the conversations of `dataset` that are held out.")
    )
    image_folder: str | None = field(
        default=None, metadata=about("Folder of relative paths of pictures; default: that of the data file.")
    )
    data_copy_dir: str | None = field(
        default=None, metadata=about("Folder on a faster disk, for copies of local rows.")
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
        check_types(self)
        check_choice(self, "prompt_style", PROMPT_STYLES)
        check_choice(self, "long_prompts", LONG_PROMPT_RULES)
        for name, otherwise in (
            ("max_train_rows", "for all rows"),
            ("max_eval_rows", "for all rows"),
            ("max_prompt_tokens", "for the longest that the model has room for"),
        ):
            value = getattr(self, name)
            check(value is None or value > 0, f"`{name}` is {value}. Expected at least 1, or nothing {otherwise}.")

        for name in ("dataset_format", "eval_dataset_format"):
            given = getattr(self, name)
            check(
                given is None or "." in given or given in (ROWS, *FORMATS),
                f"`{name}` is {given!r}. Expected one of: {', '.join((ROWS, *FORMATS))}; or a class's dotted path.",
            )
        _ = self._columns("columns"), self._columns("eval_columns")  # raise if they are of another form
        check(
            0 <= self.held_out_share < 1,
            f"`held_out_share` is {self.held_out_share}. Expected 0 or more, less than 1.",
        )
        # `data_copy_dir` copies the file of the rows alone, later on
        self._folder, self._eval_folder = _folder_of(self.dataset), _folder_of(self.eval_dataset or self.dataset)
        own = (self.eval_dataset, self.eval_dataset_format, self.eval_columns)
        check(
            not self.held_out_share or (own == (None, None, None) and self.dataset != DataConfig.dataset),
            "`held_out_share` is given, and the held-out rows are there already: in `eval_dataset`, or in the demo. "
            "Expected it with a `dataset` of your own, without `eval_dataset`, `eval_dataset_format` and "
            "`eval_columns`. Leave one of them out.",
        )

    def form(self) -> Form:
        """The form of `dataset`. Raises `ConfigError` if the class of a format can't be made."""
        return Form(
            format=_format("dataset_format", self.dataset_format),
            columns=self._columns("columns") or {},
            held_out_share=self.held_out_share,
            image_folder=Path(self.image_folder).expanduser() if self.image_folder else self._folder,
        )

    def eval_form(self) -> Form:
        """The form of the held-out rows. Raises as `form` does."""
        given, columns = self.eval_dataset_format, self._columns("eval_columns")
        form = self.form()
        return Form(
            format=form.format if given is None else _format("eval_dataset_format", given),
            columns=form.columns if columns is None else columns,
            image_folder=form.image_folder if self.image_folder else self._eval_folder,
        )

    def _columns(self, setting: str) -> dict[str, Column] | None:
        given = getattr(self, setting)
        return None if given is None else read_columns(setting, structure(setting, given, dict))

    @property
    def own_sources(self) -> list[str]:
        """The datasets of the run that are not the demo."""
        packaged = (None, DataConfig.dataset, DEMO_PICTURES)
        return [each for each in (self.dataset, self.eval_dataset) if each not in packaged]


def _folder_of(source: str) -> Path | None:
    path = Path(source).expanduser()
    return path.parent if path.suffix in ENDINGS else None


def _format(setting: str, name: str) -> DatasetFormat | None:
    if name == ROWS:
        return None
    return FORMATS[name]() if name in FORMATS else build_object(name, setting, DatasetFormat)
