"""Settings of the rows: their source, their number and their prompt. A part of `launch.settings.RunConfig`."""

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
    """Refuse an empty name, and a split of a local file, which is one split."""
    if isinstance(source, list) or str(source).startswith("["):  # several datasets
        return
    kind = type(source).__name__
    check(isinstance(source, str | PurePath), f"`{setting}` is of type {kind}. Expected a text, or a list.")
    source = str(source)
    check(bool(source), f"`{setting}` is empty. Expected a file, the name of a dataset, or `{DEMO}`. Name one.")
    file, split = _source_and_split(source, "")
    message = f"`{setting}` is {source!r}, and a local file is one split. Expected {file!r}, without a split."
    check(not split or Path(file).suffix not in ENDINGS, message)


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
    """Where the rows are. Defaults to the split `heldout` of the dataset."""
    format: Annotated[str, _check_format] | None = None
    """Defaults to that of the dataset."""
    columns: _Columns | None = None
    """Default to those of the dataset."""
    share: LessThan1 | None = None
    """Share of the prompts or conversations of the dataset to evaluate on and not to train on, in place of the others.
    Defaults to a tenth of a local file, if there is nothing else to evaluate on and something is evaluated."""


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """`dataset`, or an entry of it where it is a list."""

    path: Annotated[str, _check_source]
    """`demo`, `demo_pictures`, `arithmetic`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
    `NAME:SPLIT` is another split than `train`."""
    format: Annotated[str, _check_format] = ROWS
    """`rows` have this package's columns. `bbq`, `halueval`, `qrecc` and `topiocqa` are published datasets in their
    own files. The dotted path of a class that derives from `DatasetFormat` is a format of your own."""
    columns: _Columns | None = None
    """For a field of the row the column that holds it, or `{value: CONSTANT}`. docs/DATA.md lists the fields."""
    branch: str | None = None
    """Branch of all its rows. Defaults to that of the format or of the rows."""
    rows: Count | None = None
    """Most training rows, drawn from all over the source."""
    share: Annotated[float, Range(MORE_THAN_0, 1)] | None = None
    """Share of the run's training rows: in each entry, or in none. As many rows are drawn as the scarcest source
    allows, and none comes twice."""
    held_out_share: LessThan1 | None = None
    """As `share` of `eval_dataset`, which is the default."""
    eval: dict[str, object] | str | None = None
    """As `eval_dataset`."""


@dataclass
class DatasetSource:
    """One dataset of a run: where its rows are, and those to evaluate on."""

    entry: DatasetEntry
    eval: EvalSource
    name: str = ""  # where it is one of several
    held_out_share: float | None = None

    @property
    def train_source(self) -> tuple[str, str]:
        return _source_and_split(self.entry.path, "train")

    @property
    def eval_source(self) -> tuple[str, str]:
        path = self.eval.path
        return (self.train_source[0], "heldout") if path is None else _source_and_split(path, "heldout")

    def form(self, answers_directly: bool = False) -> Form:
        """The form of the rows, for a policy that answers directly or for the packaged chain. Raises `ConfigError` if
        the class of a format can't be made."""
        return Form(
            format=_format("dataset.format", self.entry.format, answers_directly),
            columns={**(_columns("dataset.columns", self.entry.columns) or {}), **self._branch},
            held_out_share=self.held_out_share or 0.0,
            name=self.name,
        )

    def eval_form(self, answers_directly: bool = False) -> Form:
        """The form of the held-out rows. Arguments and errors are those of `form`."""
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
    """The rows to train and evaluate on."""

    dataset: dict[str, object] | str | list[object] | None = "demo"
    """`demo`, `demo_pictures`, `arithmetic`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
    `NAME:SPLIT` is another split than `train`. A mapping with the fields of `DatasetEntry` has another format or other
    columns; several datasets are a list of such mappings."""
    eval_dataset: dict[str, object] | str | None = None
    """Source of the held-out rows, such as `heldout.jsonl` or `NAME:SPLIT`. Defaults to the split `heldout` of
    `dataset`. `{path: NAME, format: rows, columns: {}}` has another format or other columns than `dataset`. `{share:
    0.1}` holds out a share of `dataset`, which for a local file is the default."""
    max_train_rows: Count | None = None
    """Number of training rows to take, from the first one on. Defaults to all."""
    max_eval_rows: Count | None = None
    """Number of held-out rows to take, from the first one on. Defaults to all."""
    prompt_template: str | None = None
    """A file with a prompt of your own: a Jinja template with the row's fields (docs/DATA.md). Without one the prompt
    is the row's `prompt`, or the turns of its `conversation`. The packaged reward chain has two: `instruct` explains
    its task to a general chat model, `compact` is the conversation alone."""
    long_prompts: Annotated[str, LONG_PROMPT_RULES] = "error"
    """Rule for rows whose prompts leave no room for `max_completion_length` in `vllm_max_model_length`, or in the
    model's positions: `error` ends the run, `drop` leaves them out, `truncate_oldest_turns` shortens their prompts."""

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
        check(
            evaluated == EvalSource(share=evaluated.share),
            "`eval_dataset` stands beside a list in `dataset`. Expected it in its entries, as `eval`.",
        )
        sources = list[DatasetSource]()
        for number, value in enumerate(structure("dataset", self.dataset, list)):
            source = _source(f"dataset[{number}]", value, evaluated)
            name = Path(source.train_source[0]).stem.replace(":", "-")
            source.name = f"{name}-{number + 1}" if name in [other.name for other in sources] else name
            sources.append(source)
        shares = [source.entry.share for source in sources if source.entry.share is not None]
        check(
            bool(sources) and (not shares or (len(shares) == len(sources) and abs(sum(shares) - 1) < 0.01)),
            f"`dataset` has {len(sources)} entries and the shares {shares}. Expected at least one entry; no share, or "
            "one in each entry, and the sum 1.",
        )
        return sources

    @property
    def own_sources(self) -> list[str]:
        """The datasets of the run that are not packaged."""
        sources = dict.fromkeys(name for each in self.sources for name, _ in (each.train_source, each.eval_source))
        return [source for source in sources if source not in PACKAGED]


def _eval_source(setting: str, given: object) -> EvalSource:
    if isinstance(given, str) and not given.startswith("{"):
        _check_source(setting, given)
    return entry_of(setting, EvalSource, given, text="path")


def _source(setting: str, value: object, evaluated: EvalSource) -> DatasetSource:
    """A dataset from its mapping. `evaluated`: what to evaluate on, unless its entry says so."""
    entry = entry_of(setting, DatasetEntry, value)
    share = entry.held_out_share
    if entry.eval is not None:
        evaluated = _eval_source(f"{setting}.eval", entry.eval)
    share = evaluated.share if share is None else share
    check(
        not share or (evaluated == EvalSource(share=evaluated.share) and entry.path != DEMO),
        f"a share of `{setting}` is to be held out, and held-out rows are there already: in `eval_dataset`, or in the "
        "demo. Expected it with a dataset of your own, without others. Leave one of them out.",
    )
    return DatasetSource(entry, evaluated, held_out_share=share)


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
