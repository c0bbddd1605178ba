"""Settings of the data: source, number of rows and prompt. A part of `launch.settings.RunConfig`."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated

from salesrl_trl.config.checks import (
    MORE_THAN_0,
    Count,
    LessThan1,
    Range,
    build_object,
    check,
    check_settings,
    entry_of,
    structure,
)
from salesrl_trl.config.keys import takes_former_names
from salesrl_trl.data.files import DEMO, ENDINGS
from salesrl_trl.launch.data.form import Column, Form, read_columns
from salesrl_trl.launch.data.formats import FORMATS, ROWS, DatasetFormat
from salesrl_trl.launch.data.prompts import LONG_PROMPT_RULES
from salesrl_trl.launch.data.sources import PACKAGED


def _check_source(setting: str, source: object) -> None:
    """Reject an empty name, and a split of a local file."""
    if isinstance(source, list) or str(source).startswith("["):  # several datasets
        return
    kind = type(source).__name__
    check(isinstance(source, str | PurePath), f"`{setting}` is of type {kind}. Expected a text, or a list.")
    check(bool(str(source)), f"`{setting}` is empty. Expected a file, the name of a dataset, or `{DEMO}`.")
    file, split = _source_and_split(str(source), "")
    is_wrong = bool(split) and Path(file).suffix in ENDINGS
    check(not is_wrong, f"`{setting}` is {str(source)!r}, but a local file lacks splits. Expected {file!r}.")


def _check_format(setting: str, name: str) -> None:
    message = f"`{setting}` is {name!r}. Expected one of: {', '.join((ROWS, *FORMATS))}; or a class's dotted path."
    check("." in name or name in (ROWS, *FORMATS), message)


def _columns(setting: str, value: object) -> dict[str, Column] | None:
    return None if value is None else read_columns(setting, structure(setting, value, dict))


_Columns = Annotated[dict[str, object] | str, _columns]


@dataclass(frozen=True, kw_only=True)
class EvalSource:
    """`eval_dataset`, checked."""

    path: Annotated[str, _check_source] | None = None
    """Source of the held-out rows. Defaults to the split `heldout` of the dataset."""
    format: Annotated[str, _check_format] | None = None
    """Defaults to that of the dataset."""
    columns: _Columns | None = None
    """Defaults to those of the dataset."""
    share: LessThan1 | None = None
    """Share of the dataset's prompts or conversations to hold out from training, instead of another source. Defaults
    to a tenth of a local file if held-out rows are needed and no other source is set."""


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """`dataset`, or an entry of its list."""

    path: Annotated[str, _check_source]
    """`demo`, `demo_pictures`, `arithmetic`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
    `NAME:SPLIT` selects another split than `train`."""
    format: Annotated[str, _check_format] = ROWS
    """`rows` for this package's columns; `bbq`, `halueval`, `qrecc` or `topiocqa` for the original files of these
    datasets; or the dotted path of your own class that derives from `DatasetFormat`."""
    columns: _Columns | None = None
    """Maps a row's fields to columns, or to `{value: CONSTANT}`. docs/reference/data.md lists the fields."""
    branch: str | None = None
    """Branch of all rows. Defaults to that of the format or of the rows."""
    rows: Count | None = None
    """Maximum number of training rows, sampled from the whole source."""
    share: Annotated[float, Range(MORE_THAN_0, 1)] | None = None
    """Share of the run's training rows; in all entries or none. As many rows are drawn as the scarcest source allows,
    without repetition."""
    held_out_share: LessThan1 | None = None
    """Like `share` of `eval_dataset`, its default."""
    eval: dict[str, object] | str | None = None
    """Like `eval_dataset`."""


@dataclass
class DatasetSource:
    """One dataset of a run, with its held-out rows."""

    entry: DatasetEntry
    eval: EvalSource
    name: str = ""  # if there are several
    held_out_share: float | None = None

    @property
    def train_source(self) -> tuple[str, str]:
        return _source_and_split(self.entry.path, "train")

    @property
    def eval_source(self) -> tuple[str, str]:
        path = self.eval.path
        return (self.train_source[0], "heldout") if path is None else _source_and_split(path, "heldout")

    def form(self, answers_directly: bool = False) -> Form:
        """The form of the rows, for a policy that answers directly or for the built-in reward pipeline. Raises
        `ConfigError` if a format's class can't be instantiated."""
        return Form(
            format=_format("dataset.format", self.entry.format, answers_directly),
            columns={**(_columns("dataset.columns", self.entry.columns) or {}), **self._branch},
            held_out_share=self.held_out_share or 0.0,
            name=self.name,
        )

    def eval_form(self, answers_directly: bool = False) -> Form:
        """The form of the held-out rows. Arguments and errors as in `form`."""
        form, columns = self.form(answers_directly), _columns("eval_dataset.columns", self.eval.columns)
        other = self.eval.format
        return Form(
            format=form.format if other is None else _format("eval_dataset.format", other, answers_directly),
            columns=form.columns if columns is None else {**columns, **self._branch},
            name=self.name,
        )

    @property
    def _branch(self) -> dict[str, Column]:
        branch = self.entry.branch
        return {} if branch is None else read_columns("dataset.branch", {"branch": {"value": branch}})


@takes_former_names
@dataclass
class DataConfig:
    """The training and held-out rows."""

    dataset: dict[str, object] | str | list[object] | None = "demo"
    """`demo`, `demo_pictures`, `arithmetic`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
    `NAME:SPLIT` selects another split than `train`. For another format or columns, use a mapping with the fields of
    `DatasetEntry`; for several datasets, a list of such mappings."""
    eval_dataset: dict[str, object] | str | None = None
    """Source of the held-out rows, e.g. `heldout.jsonl` or `NAME:SPLIT`. Defaults to the split `heldout` of `dataset`.
    `{path: NAME, format: rows, columns: {}}` sets another format or columns than `dataset`. `{share: 0.1}`, the
    default for a local file, holds out a share of `dataset`."""
    max_train_rows: Count | None = None
    """Use only the first training rows. Defaults to all."""
    max_eval_rows: Count | None = None
    """Use only the first held-out rows. Defaults to all."""
    prompt_template: str | None = None
    """File with your own prompt: a Jinja template with the row's fields (docs/reference/data.md). Defaults to the
    row's `prompt`, or the turns of its `conversation`. The built-in reward pipeline has three templates: `instruct`
    explains its task to a general chat model, `few_shot` shows examples to a base model, `compact` only shows the
    conversation."""
    long_prompts: Annotated[str, LONG_PROMPT_RULES] = "error"
    """Rule for prompts that leave no room for `max_completion_length` within `vllm_max_model_length` or the model's
    maximum length: `error` stops the run, `drop` drops the rows, `truncate_oldest_turns` shortens the prompts."""

    def __post_init__(self) -> None:
        check_settings(self)
        self.sources = self._read_sources(_eval_source("eval_dataset", self.eval_dataset))

    def _read_sources(self, evaluated: EvalSource) -> list[DatasetSource]:
        if not (isinstance(self.dataset, list) or str(self.dataset).startswith("[")):
            given = self.dataset
            if given is None or not str(given).startswith("{"):
                _check_source("dataset", given)
                given = {"path": str(given)}
            return [_source("dataset", {"path": DEMO} | structure("dataset", given, dict), evaluated)]
        message = "`dataset` is a list. Expected `eval` in its entries, not `eval_dataset`."
        check(evaluated == EvalSource(share=evaluated.share), message)
        sources = list[DatasetSource]()
        for number, value in enumerate(structure("dataset", self.dataset, list)):
            source = _source(f"dataset[{number}]", value, evaluated)
            name = Path(source.train_source[0]).stem.replace(":", "-")
            source.name = f"{name}-{number + 1}" if name in [other.name for other in sources] else name
            sources.append(source)
        shares = [source.entry.share for source in sources if source.entry.share is not None]
        fit = not shares or (len(shares) == len(sources) and abs(sum(shares) - 1) < 0.01)
        expected = "Expected at least one entry, with shares that sum to 1 in all or none."
        found = f"`dataset` has {len(sources)} entries and the shares {shares}"
        check(bool(sources) and fit, f"{found}. {expected}")
        return sources

    @property
    def own_sources(self) -> list[str]:
        """The datasets of the run that are not built in."""
        sources = dict.fromkeys(name for each in self.sources for name, _ in (each.train_source, each.eval_source))
        return [source for source in sources if source not in PACKAGED]


def _eval_source(setting: str, given: object) -> EvalSource:
    if isinstance(given, str) and not given.startswith("{"):
        _check_source(setting, given)
    return entry_of(setting, EvalSource, given, text="path")


def _source(setting: str, value: object, evaluated: EvalSource) -> DatasetSource:
    """A dataset from its mapping. `evaluated`: the held-out rows, unless its entry sets them."""
    entry = entry_of(setting, DatasetEntry, value)
    if entry.eval is not None:
        evaluated = _eval_source(f"{setting}.eval", entry.eval)
    share = evaluated.share if entry.held_out_share is None else entry.held_out_share
    is_alone = not share or (evaluated == EvalSource(share=evaluated.share) and entry.path != DEMO)
    found = f"`{setting}` sets a held-out share, but `eval_dataset` or the demo already has held-out rows"
    check(is_alone, f"{found}. Expected one.")
    return DatasetSource(entry, evaluated, held_out_share=share)


def _source_and_split(source: str, split: str) -> tuple[str, str]:
    """A source without `:SPLIT`, and its split, which defaults to `split`."""
    name, colon, named = source.rpartition(":")
    return (name, named) if colon and named and Path(source).suffix not in ENDINGS else (source, split)


def _format(setting: str, name: str, answers_directly: bool) -> DatasetFormat | None:
    if name == ROWS:
        return None
    made = FORMATS[name]() if name in FORMATS else build_object(name, setting, DatasetFormat)
    made.answers_directly = answers_directly
    return made
