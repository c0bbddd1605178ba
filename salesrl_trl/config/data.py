"""Settings of the rows: their source, their number and their prompt. A part of `build.settings.RunConfig`."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, cast

from salesrl_trl.config.checks import build_object, check, structure
from salesrl_trl.config.ranges import (
    LESS_THAN_1,
    MORE_THAN_0,
    Count,
    Range,
    check_names,
    check_settings,
    check_value,
    entry_of,
)
from salesrl_trl.data.columns import Column, read_columns
from salesrl_trl.data.files import DEMO, ENDINGS
from salesrl_trl.data.form import Form
from salesrl_trl.data.formats import FORMATS, ROWS, DatasetFormat
from salesrl_trl.data.lengths import LONG_PROMPT_RULES
from salesrl_trl.data.sources import PACKAGED
from salesrl_trl.errors import ConfigError

HeldOutShare = Annotated[float, Range(0, LESS_THAN_1)]


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """An entry of `dataset`, where it is a list."""

    path: str
    """Source, as `dataset` names it."""
    format: str = ROWS
    """As `dataset_format`."""
    columns: dict[str, object] | str | None = None
    """As the setting `columns`."""
    branch: str | None = None
    """Branch of all its rows. Defaults to that of the format or of the rows."""
    rows: Count | None = None
    """Most training rows, drawn from all over the source. Defaults to all."""
    share: Annotated[float, Range(MORE_THAN_0, 1)] | None = None
    """Share of the run's training rows, for all entries or for none. As many rows are drawn as the scarcest source
    allows, and none comes twice. Without shares all rows are taken."""
    held_out_share: HeldOutShare | None = None
    """As the setting `held_out_share`, which is its default."""
    eval: dict[str, object] | str | None = None
    """As `eval_dataset`, for this entry."""


@dataclass
class DataConfig:
    """The rows to train and evaluate on."""

    dataset: list[object] | str | None = DEMO
    """`demo`, `demo_pictures`, `arithmetic`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
    `NAME:SPLIT` is another split than `train`. Several datasets are a list of mappings with the fields of
    `DatasetEntry`, as JSON on the command line."""
    eval_dataset: dict[str, object] | str | None = None
    """Source of the held-out rows, such as `heldout.jsonl` or `NAME:SPLIT`. Defaults to the split `heldout` of
    `dataset`. `{path: NAME, format: rows, columns: {}}` has another format or other columns than `dataset`."""
    dataset_format: str = ROWS
    """`rows` have this package's columns. `bbq`, `halueval`, `qrecc` and `topiocqa` are published datasets in their
    own files. The dotted path of a class that derives from `DatasetFormat` is a format of your own."""
    columns: dict[str, object] | str | None = None
    """For a field of the row the column that holds it, or `{value: CONSTANT}`. docs/DATA.md lists the fields."""
    held_out_share: HeldOutShare | None = None
    """Share of the prompts or conversations of `dataset` to evaluate on and not to train on, in place of
    `eval_dataset`. Defaults to a tenth of a local file, if there is no `eval_dataset` and something is evaluated."""
    data_copy_dir: str | None = None
    """Folder on a faster disk. `dataset` and `eval_dataset`, where they are local, are copied there once and read from
    there."""
    max_train_rows: Count | None = None
    """Number of training rows to take, from the first one on. Defaults to all."""
    max_eval_rows: Count | None = None
    """Number of held-out rows to take, from the first one on. Defaults to all."""
    prompt_template: str | None = None
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
        check_settings(self)
        self.name, self.entry = "", DatasetEntry(path="")  # of a dataset in a list
        self.sources = self._several() if self.is_several else [self]  # each dataset by itself
        if self.is_several:
            return
        kind = type(self.dataset).__name__
        check(isinstance(self.dataset, str | PurePath), f"`dataset` is of type {kind}. Expected a text, or a list.")
        entry, dataset = self._eval_entry(), str(self.dataset)
        self.eval_dataset = entry.get("path")  # `data_copy_dir` replaces the path alone, later on
        self._eval_format, self._eval_columns = entry.get("format"), entry.get("columns")
        for name, value in (("dataset_format", self.dataset_format), ("eval_dataset.format", self._eval_format)):
            check(
                value is None or "." in str(value) or value in (ROWS, *FORMATS),
                f"`{name}` is {value!r}. Expected one of: {', '.join((ROWS, *FORMATS))}; or a class's dotted path.",
            )
        for name, source in (("dataset", dataset), ("eval_dataset", entry.get("path") or "")):
            file, split = _source_and_split(source, "")
            message = f"`{name}` is {source!r}, and a local file is one split. Expected {file!r}, without a split."
            check(not split or Path(file).suffix not in ENDINGS, message)
        for name, value in (("columns", self.columns), ("eval_dataset.columns", self._eval_columns)):
            _columns(name, value)  # raises for another form
        self._folder, self._eval_folder = _folder_of(dataset), _folder_of(entry.get("path") or dataset)
        check(
            not self.held_out_share or (not entry and dataset != DataConfig.dataset),
            "`held_out_share` is given, and the held-out rows are there already: in `eval_dataset`, or in the demo. "
            "Expected it with a `dataset` of your own, without `eval_dataset`. Leave one of them out.",
        )

    @property
    def is_several(self) -> bool:
        """Whether `dataset` is a list."""
        return isinstance(self.dataset, list) or (isinstance(self.dataset, str) and self.dataset.startswith("["))

    def _several(self) -> list["DataConfig"]:
        given = [name for name in ("eval_dataset", "columns") if getattr(self, name) is not None]
        given += [] if self.dataset_format == ROWS else ["dataset_format"]
        check(not given, f"{', '.join(given)} stand beside a list in `dataset`. Expected them in its entries.")
        entries = [
            entry_of(f"dataset[{number}]", DatasetEntry, value)
            for number, value in enumerate(structure("dataset", self.dataset, list))
        ]
        shares = [entry.share for entry in entries if entry.share is not None]
        check(bool(entries), "`dataset` is an empty list. Expected at least one dataset.")
        check(
            not shares or (len(shares) == len(entries) and abs(sum(shares) - 1) < 0.01),
            f"`dataset` has {len(entries)} entries and the shares {shares}. Expected none, or one in each entry and "
            "the sum 1.",
        )
        return [self._alone(f"dataset[{number}]", entry, entries[:number]) for number, entry in enumerate(entries)]

    def _alone(self, where: str, entry: DatasetEntry, before: list[DatasetEntry]) -> "DataConfig":
        """The settings of one entry. Its name is that of the file, with a number if one `before` has the same."""
        columns = structure(f"{where}.columns", entry.columns or {}, dict)
        branch = {} if entry.branch is None else {"branch": {"value": entry.branch}}
        share = self.held_out_share if entry.held_out_share is None and entry.eval is None else entry.held_out_share
        try:
            alone = DataConfig(
                dataset=entry.path, dataset_format=entry.format, columns={**columns, **branch}, held_out_share=share,
                eval_dataset=entry.eval, data_copy_dir=self.data_copy_dir,
            )  # fmt: skip
        except ConfigError as error:
            raise ConfigError(f"`{where}`: {error}") from error
        again = [_name_of(other.path) for other in before].count(_name_of(entry.path))
        alone.name, alone.entry = f"{_name_of(entry.path)}{f'-{again + 1}' if again else ''}", entry
        return alone

    def _eval_entry(self) -> dict[str, Any]:
        """`eval_dataset` as a mapping of `path`, `format` and `columns`."""
        value = self.eval_dataset
        if value is None or (isinstance(value, str) and not value.startswith("{")):
            return {} if value is None else {"path": value}
        entry: dict[str, Any] = structure("eval_dataset", value, dict)
        check_names("eval_dataset", entry, ("path", "format", "columns"))
        for name in ("path", "format"):
            check_value(f"eval_dataset.{name}", entry.get(name), str | None)
        return entry

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
            image_folder=self._folder,
            name=self.name,
        )

    def eval_form(self, answers_directly: bool = False) -> Form:
        """The form of the held-out rows. Arguments and errors are those of `form`."""
        form, columns = self.form(answers_directly), _columns("eval_dataset.columns", self._eval_columns)
        other = self._eval_format
        return Form(
            format=form.format if other is None else _format("eval_dataset.format", other, answers_directly),
            columns=form.columns if columns is None else columns,
            image_folder=self._eval_folder,
            name=self.name,
        )

    @property
    def own_sources(self) -> list[str]:
        """The datasets of the run that are not packaged."""
        pairs = [(source.train_source[0], source.eval_source[0]) for source in self.sources]
        sources = dict.fromkeys(name for pair in pairs for name in pair)
        return [source for source in sources if source not in PACKAGED]


def _columns(setting: str, value: object) -> dict[str, Column] | None:
    return None if value is None else read_columns(setting, structure(setting, value, dict))


def _source_and_split(source: str, split: str) -> tuple[str, str]:
    """A source without `:SPLIT`, and that split or this one. A local file is one split."""
    name, colon, named = source.rpartition(":")
    return (name, named) if colon and named and Path(source).suffix not in ENDINGS else (source, split)


def _folder_of(source: str) -> Path | None:
    path = Path(source).expanduser()
    return path.parent if path.suffix in ENDINGS else None


def _name_of(source: str) -> str:
    """Name of a source in the ids of rows, without a colon."""
    return Path(_source_and_split(source, "")[0]).stem.replace(":", "-")


def _format(setting: str, name: str, answers_directly: bool) -> DatasetFormat | None:
    if name == ROWS:
        return None
    made = FORMATS[name]() if name in FORMATS else build_object(name, setting, DatasetFormat)
    made.answers_directly = answers_directly
    return made
