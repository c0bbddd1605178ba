"""Checks of the rows and their prompts: template, length, branches, pictures."""

import re
from collections import Counter
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.judged.judge_reward import reference_and_criteria
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.data.form import Records, drawn, mixed
from salesrl_trl.launch.data.prompts import PROMPT_STYLES, LengthLimit, PromptTemplate, read_template
from salesrl_trl.launch.data.sources import check_rows, is_file, load_records
from salesrl_trl.launch.data_config import DataConfig, DatasetEntry, DatasetSource
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.types import DEFAULT_FORMAT, JUDGE, SalesRow

SHOWN_ROWS = 5
HELD_OUT_SHARE = 0.1  # of a local file, if the settings specify no held-out rows


def own_records(data: DataConfig, reward: RewardConfig) -> list[Records]:
    """All records of each dataset, including a held-out share. Raises `DataError` as `load_rows` does."""
    return [load_records(*source.train_source, source.form(not reward.has_chain)) for source in data.sources]


def rows_of(
    records: Sequence[Records], branches: Sequence[str], limit: int | None, entries: Sequence[DatasetEntry] = ()
) -> list[SalesRow]:
    """At most `limit` rows, mixed over the datasets. For training, `entries` limit the rows or set the share of each
    dataset. Raises `DataError` for a malformed row."""
    most = limit if len(records) == 1 else None
    parts: list[Sequence[SalesRow]] = [check_rows(part, branches, most) for part in records]
    for number, entry in enumerate(entries):
        parts[number] = drawn(parts[number], entry.rows or len(parts[number]))
    return mixed(parts, [entry.share for entry in entries if entry.share is not None])[:limit]


def template_name(data: DataConfig, reward: RewardConfig) -> str | None:
    """The user's template file, or the name of a built-in style. Defaults to `instruct` for the built-in reward
    pipeline, which needs its output format, else to `None` for the rows' own prompts."""
    return data.prompt_template or ("instruct" if reward.has_chain else None)


def prompt_of(data: DataConfig, reward: RewardConfig) -> str | PromptTemplate | None:
    """The policy's prompt: `template_name`, or the template in that file."""
    template, fields = template_name(data, reward), reward.rag_service.action_format.fields
    if template is None:
        return None
    if template not in PROMPT_STYLES:
        return read_template(template, fields)
    if template != "compact" and fields != DEFAULT_FORMAT.fields:
        usual = f"the built-in prompt asks for {', '.join(DEFAULT_FORMAT.fields)}"
        expected = "Expected a `prompt_template` that asks for yours (docs/reference/data.md)."
        raise ConfigError(f"`rag.action_fields` is {', '.join(fields)}, but {usual}. {expected}")
    return template


def settle_held_out(source: DatasetSource) -> str | None:
    """Hold out a share of a local file, unless the settings specify the held-out rows. Returns a line for the banner.
    Raises `ConfigError` for a share of 0, which would evaluate the policy on its training rows."""
    if source.eval.path is not None or source.held_out_share or not is_file(source.train_source[0]):
        return None
    if source.held_out_share is not None:
        found = "`eval_dataset` has a share of 0 and names no rows, so evaluations would use the training rows"
        remedy = "Set a share or a source, or `held_out_eval: false` and `quick_eval_steps: 0`."
        raise ConfigError(f"{found}. {remedy}")
    source.held_out_share = HELD_OUT_SHARE
    other = "`eval_dataset` sets other rows or another `share`"
    return f"{HELD_OUT_SHARE:.0%} of the rows of {source.entry.path} are held out for evaluation; {other}"


def check_prompts(rows: Sequence[SalesRow], reward: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Check that every row has a conversation for the built-in reward pipeline, or a readable `reference` and
    `criteria` for the built-in judge. Raises `ConfigError`. Returns lines for the banner."""
    for row in rows if reward.judges_answers else ():
        try:
            reference_and_criteria(row.columns)
        except DataError as error:
            raise ConfigError(f"row {row.row_id!r}: {error} `{JUDGE}` reads this column.") from None
    without = [row for row in rows if not row.conversation]
    if without and reward.has_chain:
        found = f"{len(without):,} rows have a `prompt` and no `conversation` ({_named(without)})"
        remedy = "Score such rows with your own functions: `--reward_funcs my_rewards.right`."
        raise ConfigError(f"{found}, which the built-in reward pipeline needs. {remedy}")
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    marked = [row for row in rows if special and re.search("|".join(special), row.context)]
    tokens = f"special tokens of the policy, such as {tokenizer.eos_token}"
    note = f"{len(marked):,} rows contain {tokens}, which end or begin a turn in the prompt: {_named(marked)}"
    return [note] if marked else []


def prompt_limit(
    training: SalesGRPOConfig, positions: int | None, server_room: int | None = None
) -> LengthLimit | None:
    """The longest prompt that leaves room for `max_completion_length`; `None` if the limit is unknown.

    `positions`: the model's maximum length. `server_room`: a vLLM server's.
    """
    room, source = positions, "the model's positions"
    if training.use_vllm and training.vllm_mode == "colocate":
        if training.vllm_max_model_length is not None:
            room, source = training.vllm_max_model_length, "`vllm_max_model_length`"
        if isinstance(length := training.parsed_engine_kwargs().get("max_model_len"), int):
            room, source = length, "`max_model_len` of `vllm_engine_kwargs`"
        if positions is not None and room is not None and room > positions:
            remedy = f"Set `vllm_max_model_length: {positions}`."
            raise ConfigError(f"{source} is {room}, but the model only has {positions} positions. {remedy}")
    elif server_room is not None:
        room, source = server_room, "the vLLM server's length"
    completion = training.max_completion_length or 1
    if room is None:
        return None
    if completion >= room:
        raise ConfigError(f"a prompt and `max_completion_length` {completion} do not fit into {source} {room}.")
    return LengthLimit(tokens=room - completion, reason=f"{source} {room} minus `max_completion_length` {completion}")


def check_pictures(rows: Sequence[SalesRow], reads_pictures: bool, policy: str) -> None:
    """Raise `ConfigError` if rows have pictures and the policy does not read them."""
    with_pictures = [row for row in rows if row.images]
    if with_pictures and not reads_pictures:
        found = f"{len(with_pictures):,} rows have pictures ({_named(with_pictures)})"
        remedy = "Use a vision policy such as Qwen2.5-VL, or `--dataset.columns {images: {value: null}}`."
        raise ConfigError(f"{found}, but the policy {policy} only reads text. {remedy}")


def check_splits(
    train: Sequence[SalesRow], held_out: Sequence[SalesRow], branches: Sequence[str], findings: Findings
) -> None:
    """Look for branches without rows, and for held-out conversations among the training rows."""
    counts = Counter(row.branch for row in train)
    findings.figures |= {f"rows_{branch}": counts[branch] for branch in branches}
    for part, rows in (("training", train), ("held-out", held_out)):
        if rows and (without := sorted({*branches} - {row.branch for row in rows})):
            remedy = "Add rows, or remove the branch from `branches`."
            findings.add(f"No {part} row belongs to {', '.join(without)}.", remedy)
    trained = {(row.context, row.images) for row in train}
    known = [row for row in held_out if (row.context, row.images) in trained]
    if known:
        text = f"{len(known):,} of {len(held_out):,} held-out rows are also training rows: {_named(known)}."
        findings.add(text, "Hold out other rows.")
    findings.figures |= {"train_rows": len(train), "held_out_rows": len(held_out)}


def _named(rows: Sequence[SalesRow]) -> str:
    more = f" and {len(rows) - SHOWN_ROWS:,} more" if len(rows) > SHOWN_ROWS else ""
    return ", ".join(row.row_id for row in rows[:SHOWN_ROWS]) + more
