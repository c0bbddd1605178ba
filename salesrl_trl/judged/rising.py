"""What a policy writes more and more often, and what the judge gives for it within groups.

Owns what counts as something that a text has, and the windows of batches that are compared. Pure. `meter` calls it.
"""

import itertools
import math
import re
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

RECENT, BEFORE, LEAST = 5, 60, 10  # batches that are compared, most and least batches that they are compared with
RISE = 0.05  # smallest rise of a share that is looked at
LEAST_WORTH = 0.1  # smallest worth that is looked at, in units of the score
SURE = 3.0  # standard errors of a rise, and of a worth
SEEN = 0.02  # share of a batch that has to have something, for it to be remembered
READ = 100  # words of a text that are looked at, from its beginning and from its end
LONG = (1.25, 1.5, 2.0)  # a text is long from so many times the mean length of the first `LEAST` batches on

FORMATS = {
    name: re.compile(pattern, re.MULTILINE)
    for name, pattern in {
        "a list": r"^\s*([-*•]|\d+[.)])\s", "a heading": r"^\s*#+\s", "bold text": r"\*\*\S", "code": r"```",
        "a table": r"^\s*\|.*\|", "an exclamation": r"[!！]", "a question": r"[?？]",
    }.items()
}  # fmt: skip
_WORDS = re.compile(r"[\u3040-\u9fff]|[^\W_\u3040-\u9fff]+")  # a Chinese or Japanese character is a word
LENGTH, FORMAT, PHRASE = "length", "format", "phrase"

Feature = tuple[str, str]  # kind and name of something that a text has: `("phrase", "dear customer")`
Features = frozenset[Feature]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A completion, and the judge's score of it."""

    text: str
    branch: str
    group: int  # completions of one prompt have the same number
    score: float


class Rise(NamedTuple):
    """How a feature rose."""

    before: float  # share of the completions that had it
    now: float
    worth: float  # how much higher the judge scores completions with it than others of their groups

    @property
    def importance(self) -> float:
        """What the rise added to the mean score."""
        return (self.now - self.before) * self.worth


class _Batch(NamedTuple):
    size: int
    spread: float  # sum of squares of scores less their group's mean
    sums: Mapping[Feature, tuple[int, float, float]]
    """By feature: completions with it, the sum of their scores less their group's mean, and the sum over groups of
    m (1 - m / n), where m of n have it. The ratio of the last two is the slope within groups."""


class Rising:
    """The latest batches of a run, by feature."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque(maxlen=BEFORE + RECENT)
        self._lengths: list[float] = []  # mean length of the first batches

    def features(self, text: str) -> Features:
        """Everything that a text has: phrases of one and two words, formats, and how long it is."""
        words = _WORDS.findall(text.lower())
        if len(words) > 2 * READ:
            words = [*words[:READ], "...", *words[-READ:]]
        phrases = {*words, *map(" ".join, itertools.pairwise(words))}
        formats = [name for name, pattern in FORMATS.items() if pattern.search(text)]
        usual = statistics.fmean(self._lengths) if self._lengths else math.inf
        lengths = [f"a length of {times:g} times that at first" for times in LONG if len(text) >= times * usual]
        kinds = ((PHRASE, phrases), (FORMAT, formats), (LENGTH, lengths))
        return frozenset((kind, name) for kind, names in kinds for name in names)

    def add(self, written: Sequence[Written], features: Iterable[Features]) -> None:
        """A batch, with what its texts have."""
        if written and len(self._lengths) < LEAST:
            self._lengths.append(statistics.fmean(len(completion.text) for completion in written))
        groups = defaultdict[int, list[tuple[float, Features]]](list)
        for completion, features_of_text in zip(written, features, strict=True):
            groups[completion.group].append((completion.score, features_of_text))
        counts, spread = Counter[Feature](), 0.0
        totals, contrasts = defaultdict[Feature, float](float), defaultdict[Feature, float](float)
        for group in groups.values():
            mean, having = statistics.fmean(score for score, _ in group), Counter[Feature]()
            for score, features_of_text in group:
                having.update(features_of_text)
                spread += (score - mean) ** 2
                for feature in features_of_text:
                    totals[feature] += score - mean
            counts.update(having)
            for feature, m in having.items():
                contrasts[feature] += m * (1 - m / len(group))
        least = max(1, SEEN * len(written))
        frequent = {feature: (m, totals[feature], contrasts[feature]) for feature, m in counts.items() if m > least}
        self._batches.append(_Batch(len(written), spread, frequent))

    def found(self) -> dict[Feature, Rise]:
        """What rises and is rewarded, the most important first."""
        batches = [*self._batches]
        before, recent = batches[:-RECENT], batches[-RECENT:]
        n_old, n_new = (sum(batch.size for batch in part) for part in (before, recent))
        if len(before) < LEAST or not n_old * n_new:
            return {}
        sd = math.sqrt(sum(batch.spread for batch in batches) / (n_old + n_new))
        counts, rises = Counter[Feature](), dict[tuple[int, float], tuple[Feature, Rise]]()
        for batch in recent:
            counts.update({feature: count for feature, (count, _, _) in batch.sums.items()})
        for feature, new in sorted(counts.items()):  # in an order that does not depend on hashes
            if new < RISE * n_new:
                continue
            sums = [batch.sums[feature] for batch in batches if feature in batch.sums]
            count, total, contrast = (sum(column) for column in zip(*sums, strict=True))
            rise = Rise((count - new) / n_old, new / n_new, total / contrast if contrast else 0.0)
            pooled = count / (n_old + n_new)
            error = math.sqrt(pooled * (1 - pooled) * (1 / n_old + 1 / n_new))
            if rise.now - rise.before < max(RISE, SURE * error):
                continue
            if rise.worth >= LEAST_WORTH and rise.worth > SURE * sd / math.sqrt(contrast):
                rises.setdefault((new, round(total, 9)), (feature, rise))  # phrases of one sentence are one thing
        return dict(sorted(rises.values(), key=lambda one: -one[1].importance))
