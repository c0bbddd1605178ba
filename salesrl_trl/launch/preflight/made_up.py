"""Made-up completions, good and bad in known ways, in batches shaped as those of GRPO.

`made_up.toml` has the kinds of completions (variants) and their shares. Owns their order. `scored_load` scores them.
"""

import itertools
import json
import random
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from salesrl_trl.judged.parsing import MAX_FIELD_CHARS, is_empty_text
from salesrl_trl.types import DEFAULT_FORMAT, SalesRow

EXCERPTS = 4  # profiles, and as many summaries: together more actions than most groups have
QUERY_CHARS = 300  # longest query made from a customer's message. A policy's queries are shorter.
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
DEFAULT_MIX: dict[str, int] = _TABLE["mix"]  # shares of the variants

Fields = dict[str, str]  # a valid action's fields by name


class Completion(NamedTuple):
    """One completion of a batch."""

    row: int
    variant: str
    text: str


def cases_of(action: Fields) -> dict[str, list[str]]:
    """By variant, completions that write a valid action, or spoil it."""
    query, text = action["rewritten_query"], _json(action)
    words = (query + " ") * MAX_FIELD_CHARS
    known = {
        "query": query, "text": text, "open": text[:-1], "python": str(action), "fenced": f"```json\n{text}\n```",
        "indented": json.dumps(action, ensure_ascii=False, indent=2), "at": words[:MAX_FIELD_CHARS],
        "over": words[: MAX_FIELD_CHARS + 1], "endless": words[: 2 * MAX_FIELD_CHARS], "han": "长" * MAX_FIELD_CHARS,
        "spaced": "\u200b".join(query), "marked": "".join(f"{letter}\u0301\u0323" for letter in query),
        "half": json.dumps({**action, "user_profile": "\ud83d"}),
    }  # fmt: skip
    return {
        variant: [made for case in cases for made in _made(case, action, known)]
        for variant, cases in _TABLE["cases"].items()
    }


def _made(case: Mapping[str, Any], action: Fields, known: Mapping[str, str]) -> list[str]:
    """The completions of a case of `made_up.toml`, whose head says what each kind is."""

    def filled(template: str, name: str = "") -> str:
        return Template(template).substitute(known, value=action.get(name))

    [(kind, content)] = case.items()
    match kind:
        case "text":
            return [filled(content)]
        case "each":
            return [_json({**action, name: filled(content, name)}) for name in action]
        case "all":
            return [_json({name: filled(content, name) for name in action})]
        case "object":
            return [_json(content)]
        case "json":
            return [_json(action | {name: json.loads(value) for name, value in content.items()})]
        case "without":
            return [_json({name: value for name, value in action.items() if name != content})]
    return [_json(action | {name: filled(template, name) for name, template in content.items()})]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def batches(
    rows: Sequence[SalesRow], drafts: Mapping[str, list[Fields]], *, mix: Sequence[str], prompts: int,
    generations: int, seed: int,
) -> Iterator[list[Completion]]:  # fmt: skip
    """Batches without end, the same for the same seed: `generations` completions, one after the other, for each of
    `prompts` rows. Used rows come again in a new order. `mix` has each variant as often as its share is. `drafts` has
    valid actions by row id."""
    rng = random.Random(seed)
    order = itertools.chain.from_iterable(rng.sample(range(len(rows)), len(rows)) for _ in itertools.count())
    dealt = itertools.chain.from_iterable(rng.sample(mix, len(mix)) for _ in itertools.count())
    turns = Counter[str]()
    while True:
        batch: list[Completion] = []
        for index in itertools.islice(order, prompts):
            twin, *others = actions(rows[index], drafts.get(rows[index].row_id), generations + 1, rng)
            for name, action in zip(itertools.islice(dealt, generations), others, strict=True):
                cases = cases_of(twin if name == "duplicate" else action)[name]
                batch.append(Completion(index, name, cases[turns[name] % len(cases)]))
                turns[name] += 1
        yield batch


def actions(row: SalesRow, drafts: Sequence[Fields] | None, count: int, rng: random.Random) -> list[Fields]:
    """`count` valid actions for a row, which repeat only when all different ones are used: the drafts' fields in new
    combinations, or the customer's questions, with excerpts of the conversation."""
    if drafts:
        pools = [list(dict.fromkeys(draft[name] for draft in drafts)) for name in DEFAULT_FORMAT.fields]
    else:
        asked = [message.content[:QUERY_CHARS] for message in row.conversation if message.role == "customer"]
        queries = [text for text in asked if not is_empty_text(text)] or ["the price of the course"]
        starts = [rng.randrange(len(row.context)) for _ in range(2 * EXCERPTS)]
        excerpts = [row.context[start : start + rng.randint(10, 80)] for start in starts]
        pools = [excerpts[:EXCERPTS], queries, excerpts[EXCERPTS:]]
    combined = [dict(zip(DEFAULT_FORMAT.fields, values, strict=True)) for values in itertools.product(*pools)]
    rng.shuffle(combined)
    return list(itertools.islice(itertools.cycle(combined), count))
