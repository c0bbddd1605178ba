"""Settings of the rows: their source, their number and their prompt."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from salesrl_trl.config.checks import build_object, check, structure
from salesrl_trl.config.ranges import LESS_THAN_1, Count, Range, check_settings
from salesrl_trl.data.columns import Column, read_columns
from salesrl_trl.data.demo_pictures import DEMO_PICTURES
from salesrl_trl.data.files import ENDINGS
from salesrl_trl.data.form import Form
from salesrl_trl.data.formats import FORMATS, ROWS, DatasetFormat
from salesrl_trl.data.lengths import LONG_PROMPT_RULES


@dataclass
class DataConfig:
    """The rows to train and evaluate on."""

    dataset: str = "demo"
    """`demo`, `demo_pictures`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub."""
    train_split: str = "train"
    """Split to train on."""
    eval_dataset: str | None = None
    """Source of the held-out rows. Defaults to `dataset`."""
    eval_split: str = "heldout"
    """Split to evaluate on."""
    dataset_format: str = ROWS
    """`rows` have this package's columns. `bbq`, `halueval`, `qrecc` and `topiocqa` are published datasets in their
    own files. The dotted path of a class that derives from `DatasetFormat` is a format of your own."""
    eval_dataset_format: str | None = None
    """Format of `eval_dataset`. Defaults to `dataset_format`."""
    columns: dict[str, object] | str | None = None
    """For a field of the row the column that holds it, or `{value: CONSTANT}`. docs/DATA.md lists the fields."""
    eval_columns: dict[str, object] | str | None = None
    """Columns of `eval_dataset`. Defaults to `columns`."""
    held_out_share: Annotated[float, Range(0, LESS_THAN_1)] = 0.0
    """Share of the conversations of `dataset` to evaluate on and not to train on, in place of `eval_dataset`."""
    data_copy_dir: str | None = None
    """Folder on a faster disk. `dataset` and `eval_dataset`, where they are local, are copied there once and read from
    there."""
    max_train_rows: Count | None = None
    """Number of training rows to take, from the first one on. Defaults to all."""
    max_eval_rows: Count | None = None
    """Number of held-out rows to take, from the first one on. Defaults to all."""
    prompt_template: str = "instruct"
    """The policy's prompt. `instruct` explains the task to a general chat model. `compact` is the conversation
    alone. Else a file with a prompt of your own: a Jinja template with the row's fields, which docs/DATA.md lists."""
    max_prompt_tokens: Count | None = None
    """Most tokens of a prompt, the chat template's included. Defaults to `vllm_max_model_length`, or without it the
    model's positions, less `max_completion_length`."""
    long_prompts: Annotated[str, LONG_PROMPT_RULES] = "error"
    """Rule for rows with longer prompts. `error` ends the run before a model is loaded. `drop` leaves these rows out.
    `truncate_oldest_turns` leaves their oldest turns out of the prompt."""

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("dataset_format", "eval_dataset_format"):
            given = getattr(self, name)
            check(
                given is None or "." in given or given in (ROWS, *FORMATS),
                f"`{name}` is {given!r}. Expected one of: {', '.join((ROWS, *FORMATS))}; or a class's dotted path.",
            )
        _ = self._columns("columns"), self._columns("eval_columns")  # raise if they are of another form
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
            image_folder=self._folder,
        )

    def eval_form(self) -> Form:
        """The form of the held-out rows. Raises as `form` does."""
        given, columns = self.eval_dataset_format, self._columns("eval_columns")
        form = self.form()
        return Form(
            format=form.format if given is None else _format("eval_dataset_format", given),
            columns=form.columns if columns is None else columns,
            image_folder=self._eval_folder,
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
