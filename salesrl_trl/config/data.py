"""Settings of the rows: their source, their number and their prompt. A part of `build.settings.RunConfig`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from salesrl_trl.config.checks import build_object, check, check_path, check_source_name, structure
from salesrl_trl.config.ranges import (
    LESS_THAN_1,
    Count,
    Range,
    check_names,
    check_settings,
    check_value,
)
from salesrl_trl.data.arithmetic import ARITHMETIC
from salesrl_trl.data.columns import Column, read_columns
from salesrl_trl.data.demo_pictures import DEMO_PICTURES
from salesrl_trl.data.files import DEMO, ENDINGS
from salesrl_trl.data.form import Form
from salesrl_trl.data.formats import FORMATS, ROWS, DatasetFormat
from salesrl_trl.data.lengths import LONG_PROMPT_RULES
from salesrl_trl.errors import Refusals


@dataclass
class DataConfig:
    """The rows to train and evaluate on."""

    dataset: Annotated[str, check_source_name] = DEMO
    """`demo`, `demo_pictures`, `arithmetic`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
    `NAME:SPLIT` is another split than `train`."""
    eval_dataset: dict[str, object] | str | None = None
    """Source of the held-out rows, such as `heldout.jsonl` or `NAME:SPLIT`. Defaults to the split `heldout` of
    `dataset`. `{path: NAME, format: rows, columns: {}}` has another format or other columns than `dataset`."""
    dataset_format: str = ROWS
    """`rows` have this package's columns. `bbq`, `halueval`, `qrecc` and `topiocqa` are published datasets in their
    own files. The dotted path of a class that derives from `DatasetFormat` is a format of your own."""
    columns: dict[str, object] | str | None = None
    """For a field of the row the column that holds it, or `{value: CONSTANT}`. docs/DATA.md lists the fields."""
    held_out_share: Annotated[float, Range(0, LESS_THAN_1)] | None = None
    """Share of the prompts or conversations of `dataset` to evaluate on and not to train on, in place of
    `eval_dataset`. Defaults to a tenth of a local file, if there is no `eval_dataset` and something is evaluated."""
    data_copy_dir: Annotated[str, check_path] | None = None
    """Folder on a faster disk. `dataset` and `eval_dataset`, where they are local, are copied there once and read from
    there."""
    max_train_rows: Count | None = None
    """Number of training rows to take, from the first one on. Defaults to all."""
    max_eval_rows: Count | None = None
    """Number of held-out rows to take, from the first one on. Defaults to all."""
    prompt_template: Annotated[str, check_path] | None = None
    """A file with a prompt of your own: a Jinja template with the row's fields, which docs/DATA.md lists. Without one
    the prompt is the row's `prompt`, or the turns of its `conversation`, as they are. For the packaged reward chain
    there are two templates: `instruct` explains its task to a general chat model. `compact` is the conversation
    alone."""
    max_prompt_tokens: Count | None = None
    """Most tokens of a prompt, the chat template's included. Defaults to `vllm_max_model_length`, or without it the
    model's positions, less `max_completion_length`."""
    long_prompts: Annotated[str, LONG_PROMPT_RULES] = "error"
    """Rule for rows with longer prompts. `error` ends the run before a model is loaded. `drop` leaves these rows out.
    `truncate_oldest_turns` leaves their oldest turns out of the prompt."""

    def __post_init__(self) -> None:
        refused, entry = Refusals(), dict[str, Any]()
        with refused:
            check_settings(self)
        with refused.of(self, "eval_dataset"):
            entry = self._eval_entry()
            self.eval_dataset = entry.get("path")  # `data_copy_dir` replaces the path alone, later on
        self._eval_format, self._eval_columns = entry.get("format"), entry.get("columns")
        self._folder = self._eval_folder = None
        for name, at in (("dataset_format", "dataset_format"), ("eval_dataset.format", "_eval_format")):
            with refused:
                value, kinds = getattr(self, at), (ROWS, *FORMATS)
                message = f"`{name}` is {value!r}. Expected one of: {', '.join(kinds)}; or a class's dotted path."
                check(value is None or "." in str(value) or value in kinds, message)
        for name in ("dataset", "eval_dataset"):
            with refused:
                source = getattr(self, name) or ""
                file, split = _source_and_split(source, "")
                message = f"`{name}` is {source!r}, and a local file is one split. Expected {file!r}, without a split."
                check(not split or Path(file).suffix not in ENDINGS, message)
        for name, at in (("columns", "columns"), ("eval_dataset.columns", "_eval_columns")):
            with refused:
                _columns(name, getattr(self, at))  # raises for another form
        with refused:
            self._folder, self._eval_folder = _folder_of(self.dataset), _folder_of(entry.get("path") or self.dataset)
            check(
                not self.held_out_share
                or (self.eval_dataset is None and not entry and self.dataset != DataConfig.dataset),
                "`held_out_share` is given, and the held-out rows are there already: in `eval_dataset`, or in the "
                "demo. Expected it with a `dataset` of your own, without `eval_dataset`. Leave one of them out.",
            )
        refused.tell(self)

    def _eval_entry(self) -> dict[str, Any]:
        """`eval_dataset` as a mapping of `path`, `format` and `columns`."""
        value: Any = self.eval_dataset
        if value is None or (isinstance(value, str) and not value.startswith("{")):
            entry = {} if value is None else {"path": value}
            where = "eval_dataset"
        else:
            entry, where = structure("eval_dataset", value, dict), "eval_dataset.path"
            check_names("eval_dataset", entry, ("path", "format", "columns"))
        check_value(where, entry.get("path"), Annotated[str, check_source_name] | None)
        check_value("eval_dataset.format", entry.get("format"), str | None)
        return entry

    @property
    def train_source(self) -> tuple[str, str]:
        """`dataset`, and its split to train on."""
        return _source_and_split(self.dataset, "train")

    @property
    def eval_source(self) -> tuple[str, str]:
        """The source of the held-out rows, and its split."""
        path = cast(str | None, self.eval_dataset)
        return (self.train_source[0], "heldout") if path is None else _source_and_split(path, "heldout")

    def form(self) -> Form:
        """The form of `dataset`. Raises `ConfigError` if the class of a format can't be made."""
        return Form(
            format=_format("dataset_format", self.dataset_format),
            columns=_columns("columns", self.columns) or {},
            held_out_share=self.held_out_share or 0.0,
            image_folder=self._folder,
        )

    def eval_form(self) -> Form:
        """The form of the held-out rows. Raises as `form` does."""
        form, columns = self.form(), _columns("eval_dataset.columns", self._eval_columns)
        return Form(
            format=form.format if self._eval_format is None else _format("eval_dataset.format", self._eval_format),
            columns=form.columns if columns is None else columns,
            image_folder=self._eval_folder,
        )

    @property
    def own_sources(self) -> list[str]:
        """The datasets of the run that are not packaged."""
        sources = {self.train_source[0]: None, self.eval_source[0]: None}
        return [source for source in sources if source not in (DEMO, DEMO_PICTURES, ARITHMETIC)]


def _columns(setting: str, value: object) -> dict[str, Column] | None:
    return None if value is None else read_columns(setting, structure(setting, value, dict))


def _source_and_split(source: str, split: str) -> tuple[str, str]:
    """A source without `:SPLIT`, and that split or this one. A local file is one split."""
    name, colon, named = source.rpartition(":")
    return (name, named) if colon and named and Path(source).suffix not in ENDINGS else (source, split)


def _folder_of(source: str) -> Path | None:
    path = Path(source).expanduser()
    return path.parent if path.suffix in ENDINGS else None


def _format(setting: str, name: str) -> DatasetFormat | None:
    if name == ROWS:
        return None
    return FORMATS[name]() if name in FORMATS else build_object(name, setting, DatasetFormat)
