"""Settings of the rows: their source, their number and their prompt. A part of `build.settings.RunConfig`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from salesrl_trl.config.checks import build_object, check, check_path, structure
from salesrl_trl.config.ranges import LESS_THAN_1, Count, Range, check_settings, entry_of
from salesrl_trl.data.arithmetic import ARITHMETIC
from salesrl_trl.data.columns import Column, read_columns
from salesrl_trl.data.demo_pictures import DEMO_PICTURES
from salesrl_trl.data.files import DEMO, ENDINGS
from salesrl_trl.data.form import Form
from salesrl_trl.data.formats import FORMATS, ROWS, DatasetFormat
from salesrl_trl.data.lengths import LONG_PROMPT_RULES
from salesrl_trl.errors import Refusals


def _check_source(setting: str, source: str) -> None:
    """Refuse an empty name, a path that can't be looked at, and a split of a local file, which is one split."""
    check(bool(source), f"`{setting}` is empty. Expected a file, the name of a dataset, or `{DEMO}`. Name one.")
    check_path(setting, source)
    file, split = _source_and_split(source, "")
    message = f"`{setting}` is {source!r}, and a local file is one split. Expected {file!r}, without a split."
    check(not split or Path(file).suffix not in ENDINGS, message)


def _check_format(setting: str, name: str) -> None:
    message = f"`{setting}` is {name!r}. Expected one of: {', '.join((ROWS, *FORMATS))}; or a class's dotted path."
    check("." in name or name in (ROWS, *FORMATS), message)


def _columns(setting: str, value: object) -> dict[str, Column] | None:
    """The columns of a setting. Raises `ConfigError` for another form."""
    return None if value is None else read_columns(setting, structure(setting, value, dict))


_Columns = Annotated[dict[str, object] | str, _columns]


@dataclass(frozen=True, kw_only=True)
class EvalSource:
    """`eval_dataset`, checked."""

    path: Annotated[str, _check_source] | None = None
    format: Annotated[str, _check_format] | None = None
    columns: _Columns | None = None


@dataclass
class DataConfig:
    """The rows to train and evaluate on."""

    dataset: Annotated[str, _check_source] = DEMO
    """`demo`, `demo_pictures`, `arithmetic`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
    `NAME:SPLIT` is another split than `train`."""
    eval_dataset: dict[str, object] | str | None = None
    """Source of the held-out rows, such as `heldout.jsonl` or `NAME:SPLIT`. Defaults to the split `heldout` of
    `dataset`. `{path: NAME, format: rows, columns: {}}` has another format or other columns than `dataset`."""
    dataset_format: Annotated[str, _check_format] = ROWS
    """`rows` have this package's columns. `bbq`, `halueval`, `qrecc` and `topiocqa` are published datasets in their
    own files. The dotted path of a class that derives from `DatasetFormat` is a format of your own."""
    columns: _Columns | None = None
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
        refused = Refusals()
        refused.each(lambda: check_settings(self))
        with refused.of(self, "eval_dataset"):
            given = {} if self.eval_dataset is None else self.eval_dataset
            if isinstance(given, str) and not given.startswith("{"):
                _check_source("eval_dataset", given)
                given = {"path": given}
            self._eval = entry_of("eval_dataset", EvalSource, given)
            self.eval_dataset = self._eval.path  # `data_copy_dir` replaces the path alone, later on
        with refused:
            self._folder, self._eval_folder = _folder_of(self.dataset), _folder_of(self.eval_dataset or self.dataset)
            check(
                not self.held_out_share or (self._eval == EvalSource() and self.dataset != DataConfig.dataset),
                "`held_out_share` is given, and the held-out rows are there already: in `eval_dataset`, or in the "
                "demo. Expected it with a `dataset` of your own, without `eval_dataset`. Leave one of them out.",
            )
        refused.tell(self)

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
        form, columns = self.form(), _columns("eval_dataset.columns", self._eval.columns)
        return Form(
            format=form.format if self._eval.format is None else _format("eval_dataset.format", self._eval.format),
            columns=form.columns if columns is None else columns,
            image_folder=self._eval_folder,
        )

    @property
    def own_sources(self) -> list[str]:
        """The datasets of the run that are not packaged."""
        sources = {self.train_source[0]: None, self.eval_source[0]: None}
        return [source for source in sources if source not in (DEMO, DEMO_PICTURES, ARITHMETIC)]


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
