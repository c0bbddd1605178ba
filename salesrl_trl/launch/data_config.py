"""Settings of the rows: their source, their number and their prompt. A part of `launch.settings.RunConfig`."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, cast

from salesrl_trl.config.checks import build_object, check, check_path, structure
from salesrl_trl.config.ranges import (
    MORE_THAN_0,
    Count,
    LessThan1,
    Range,
    check_settings,
    entry_of,
)
from salesrl_trl.data.files import DEMO, ENDINGS
from salesrl_trl.errors import ConfigError, Refusals
from salesrl_trl.launch.data.columns import Column, read_columns
from salesrl_trl.launch.data.form import Form
from salesrl_trl.launch.data.formats import FORMATS, ROWS, DatasetFormat
from salesrl_trl.launch.data.lengths import LONG_PROMPT_RULES
from salesrl_trl.launch.data.sources import PACKAGED


def _check_source(setting: str, source: object) -> None:
    """Refuse an empty name, a path that can't be looked at, and a split of a local file, which is one split."""
    if isinstance(source, list) or str(source).startswith("["):  # several datasets
        return
    kind = type(source).__name__
    check(isinstance(source, str | PurePath), f"`{setting}` is of type {kind}. Expected a text, or a list.")
    source = str(source)
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


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """An entry of `dataset`, where it is a list."""

    path: str  # a source, as `dataset` names it
    format: str = ROWS  # as `dataset_format`
    columns: dict[str, object] | None = None  # as `columns`
    branch: str | None = None  # of all its rows. Defaults to that of the format or of the rows
    rows: Count | None = None  # most training rows, drawn from all over the source
    share: Annotated[float, Range(MORE_THAN_0, 1)] | None = None
    """Share of the run's training rows: in each entry, or in none. As many rows are drawn as the scarcest source
    allows, and none comes twice."""
    held_out_share: LessThan1 | None = None  # defaults to the setting of this name, without `eval`
    eval: dict[str, object] | str | None = None  # as `eval_dataset`


@dataclass
class DataConfig:
    """The rows to train and evaluate on."""

    dataset: Annotated[list[object] | str, _check_source] | None = DEMO
    """`demo`, `demo_pictures`, `arithmetic`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
    `NAME:SPLIT` is another split than `train`. Several datasets are a list of mappings with the fields of
    `DatasetEntry`, as JSON on the command line."""
    eval_dataset: dict[str, object] | str | None = None
    """Source of the held-out rows, such as `heldout.jsonl` or `NAME:SPLIT`. Defaults to the split `heldout` of
    `dataset`. `{path: NAME, format: rows, columns: {}}` has another format or other columns than `dataset`."""
    dataset_format: Annotated[str, _check_format] = ROWS
    """`rows` have this package's columns. `bbq`, `halueval`, `qrecc` and `topiocqa` are published datasets in their
    own files. The dotted path of a class that derives from `DatasetFormat` is a format of your own."""
    columns: _Columns | None = None
    """For a field of the row the column that holds it, or `{value: CONSTANT}`. docs/DATA.md lists the fields."""
    held_out_share: LessThan1 | None = None
    """Share of the prompts or conversations of `dataset` to evaluate on and not to train on, in place of
    `eval_dataset`. Defaults to a tenth of a local file, if there is no `eval_dataset` and something is evaluated."""
    max_train_rows: Count | None = None
    """Number of training rows to take, from the first one on. Defaults to all."""
    max_eval_rows: Count | None = None
    """Number of held-out rows to take, from the first one on. Defaults to all."""
    prompt_template: Annotated[str, check_path] | None = None
    """A file with a prompt of your own: a Jinja template with the row's fields, which docs/DATA.md lists. Without one
    the prompt is the row's `prompt`, or the turns of its `conversation`, as they are. For the packaged reward chain
    there are two: `instruct` explains its task to a general chat model. `compact` is the conversation alone."""
    max_prompt_tokens: Count | None = None
    """Most tokens of a prompt, the chat template's included. Defaults to `vllm_max_model_length`, or without it the
    model's positions, less `max_completion_length`."""
    long_prompts: Annotated[str, LONG_PROMPT_RULES] = "error"
    """Rule for rows with longer prompts. `error` ends the run before a model is loaded. `drop` leaves these rows out.
    `truncate_oldest_turns` leaves their oldest turns out of the prompt."""

    def __post_init__(self) -> None:
        self.name, self.entry, self.sources = "", DatasetEntry(path=""), [self]
        """Of one dataset among several: its name and its entry. Each dataset by itself."""
        refused = Refusals()
        given_dataset = self.dataset
        refused.each(lambda: check_settings(self))
        if isinstance(given_dataset, list) or str(given_dataset).startswith("["):
            with refused.of(self, "dataset"):
                self.sources = self._several()
            refused.tell(self)
            return
        with refused.of(self, "eval_dataset"):
            given = {} if self.eval_dataset is None else self.eval_dataset
            if isinstance(given, str) and not given.startswith("{"):
                _check_source("eval_dataset", given)
                given = {"path": given}
            self._eval = entry_of("eval_dataset", EvalSource, given)
            self.eval_dataset = self._eval.path
        refused.check(
            lambda: not self.held_out_share or (self._eval == EvalSource() and self.dataset != DataConfig.dataset),
            "`held_out_share` is given, and the held-out rows are there already: in `eval_dataset`, or in the "
            "demo. Expected it with a `dataset` of your own, without `eval_dataset`. Leave one of them out.",
        )
        refused.tell(self)

    def _several(self) -> list["DataConfig"]:
        """The settings of each entry alone. Raises `ConfigError` if they do not work, alone or together."""
        given = [name for name in ("eval_dataset", "columns") if getattr(self, name) is not None]
        given += [] if self.dataset_format == ROWS else ["dataset_format"]
        check(not given, f"{', '.join(given)} stand beside a list in `dataset`. Expected them in its entries.")
        sources = list[DataConfig]()
        for number, value in enumerate(structure("dataset", self.dataset, list)):
            entry = entry_of(f"dataset[{number}]", DatasetEntry, value)
            branch = {} if entry.branch is None else {"branch": {"value": entry.branch}}
            share = self.held_out_share if (entry.held_out_share, entry.eval) == (None, None) else entry.held_out_share
            try:
                columns = {**(entry.columns or {}), **branch}
                source = DataConfig(entry.path, entry.eval, entry.format, columns, share)
            except ConfigError as error:
                raise ConfigError(f"`dataset[{number}]`: {error}") from error
            name = Path(source.train_source[0]).stem.replace(":", "-")
            taken = [other.name for other in sources]
            source.name, source.entry = name if name not in taken else f"{name}-{number + 1}", entry
            sources.append(source)
        shares = [source.entry.share for source in sources if source.entry.share is not None]
        check(
            bool(sources) and (not shares or (len(shares) == len(sources) and abs(sum(shares) - 1) < 0.01)),
            f"`dataset` has {len(sources)} entries and the shares {shares}. Expected at least one entry; no share, or "
            "one in each entry, and the sum 1.",
        )
        return sources

    @property
    def train_source(self) -> tuple[str, str]:
        """`dataset`, and its split to train on."""
        return _source_and_split(str(self.dataset), "train")

    @property
    def eval_source(self) -> tuple[str, str]:
        """The source of the held-out rows, and its split."""
        path = cast(str | None, self.eval_dataset)
        return (self.train_source[0], "heldout") if path is None else _source_and_split(path, "heldout")

    def form(self, answers_directly: bool = False) -> Form:
        """The form of `dataset`, for a policy that answers directly or for the packaged chain. Raises `ConfigError`
        if the class of a format can't be made."""
        return Form(
            format=_format("dataset_format", self.dataset_format, answers_directly),
            columns=_columns("columns", self.columns) or {},
            held_out_share=self.held_out_share or 0.0,
            name=self.name,
        )

    def eval_form(self, answers_directly: bool = False) -> Form:
        """The form of the held-out rows. Arguments and errors are those of `form`."""
        form, columns = self.form(answers_directly), _columns("eval_dataset.columns", self._eval.columns)
        branch = {} if self.entry.branch is None else {"branch": form.columns["branch"]}
        other = self._eval.format
        return Form(
            format=form.format if other is None else _format("eval_dataset.format", other, answers_directly),
            columns=form.columns if columns is None else {**columns, **branch},
            name=self.name,
        )

    @property
    def own_sources(self) -> list[str]:
        """The datasets of the run that are not packaged."""
        sources = dict.fromkeys(name for each in self.sources for name, _ in (each.train_source, each.eval_source))
        return [source for source in sources if source not in PACKAGED]


def _source_and_split(source: str, split: str) -> tuple[str, str]:
    """A source without `:SPLIT`, and that split or this one. A local file is one split."""
    name, colon, named = source.rpartition(":")
    return (name, named) if colon and named and Path(source).suffix not in ENDINGS else (source, split)


def _format(setting: str, name: str, answers_directly: bool) -> DatasetFormat | None:
    if name == ROWS:
        return None
    made = FORMATS[name]() if name in FORMATS else build_object(name, setting, DatasetFormat)
    made.answers_directly = answers_directly
    return made
