"""Whether a judge's score still means what it meant: a second judge scores some completions too. Pure:
`judged.meter_part` makes the calls.

`Rising` finds what the policy writes more and more often and what the judge rewards within groups. Both judges'
difference on completions with such a thing is compared with that on completions without it.

The rule of an alarm is a wager. A suspicion gets a capital, and each verdict multiplies it:

    capital <- capital * exp(z - 1/2),    z in [-CLIP, CLIP]

Where z has a mean of at most 0 and a variance of at most 1, the factor's mean is about 1 or less, so that the capital
of an honest judge does not grow in the mean. All suspicions together get less than 1 for each batch, and a capital of
`ALARM` is an alarm. So the chance of a false alarm in n batches is at most about n / `ALARM` (Ville's inequality).
"""

import itertools
import math
import random
import re
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from salesrl_trl.reward.scorer import MeterSettings

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

ALARM = 10_000.0  # capital of an alarm: at most 1 honest run in 10 has one in 1,000 batches
CLIP = 2.0  # largest |z|. A larger one would let rare, far-off verdicts decide.
TOLERANCE = 0.05  # a difference between two judges that means nothing yet, in units of the score
CONFIRMED = 0.7  # share of a thing's worth that the second judge has to confirm
FLOOR = 0.05  # smallest standard deviation of a difference, for judges whose scores are coarse
SUSPECTS = 4  # things that are looked at at the same time
CLEARED = math.exp(-2)  # share of its capital at which a suspect is let go
AGAIN = 2.0  # times its importance at which it is looked at again
RANDOM = 0.3  # share of the calls that look at completions by lot, for the agreement of both judges
FEWEST, MOST = 12, 160  # completions with two verdicts that a scale needs, and the latest that are kept
MOST_AT_ONCE = 8  # completions with something suspect that are asked for after one batch
OF_EACH_BATCH = 0.8  # capital

WARN, STOP, SECOND_JUDGE = "warn", "stop", "second_judge"  # what an alarm does

Feature = tuple[str, str]  # kind and name of something that a text has: `("phrase", "dear customer")`
Features = frozenset[Feature]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    text: str
    branch: str
    group: int  # completions of one prompt have the same number
    score: float


class Rise(NamedTuple):
    before: float  # share of the completions that had it
    now: float
    worth: float  # how much higher the judge scores completions with it than others of their groups

    @property
    def importance(self) -> float:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """What the judge rewards and the second one does not."""

    what: Feature
    before: float  # share of the completions that had it
    now: float
    worth: float  # as in `Rise`
    confirmed: float  # the same by the second judge, on the completions that it scored
    example: str

    def described(self, *, with_text: bool) -> str:
        """In words. `with_text`: whether the phrase and the example, which may quote a customer, are shown."""
        kind, name = self.what
        shown = f"the phrase {name!r}" if kind == PHRASE and with_text else "a phrase" if kind == PHRASE else name
        return (
            f"{shown} is in {self.now:.0%} of the completions, {self.before:.0%} before; the judge gives "
            f"{self.worth:+.2f} for it within groups, the second judge {self.confirmed:+.2f}"
        ) + f". For example: {self.example}" * with_text


@dataclass(slots=True)
class _Suspect:
    rise: Rise
    capital: float
    least: float  # capital at which it is let go
    gaps: list[float] = field(default_factory=list)  # by how much the judge liked it more than the second one


@dataclass(slots=True)
class _SecondCall:
    written: Written
    features: Features
    tested: Sequence[Feature]  # the suspects of that time that it has
    is_by_lot: bool
    second: float = math.nan

    def gap(self, ratio: float) -> float:
        return self.written.score - ratio * self.second


def _factor(z: float) -> float:
    return math.exp(min(max(z, -CLIP), CLIP) - 0.5)


class Meter:
    def __init__(self, settings: MeterSettings) -> None:
        self.alarms: list[Alarm] = []  # whoever reads them empties the list
        self._settings = settings
        self._rng = random.Random(0)
        self._calls = self._by_lot = 0.0  # calls that may still be made, and those of them that go by lot
        self._rising = Rising()
        self._free = 0.0  # capital that nobody has
        self._suspects: dict[Feature, _Suspect] = {}
        self._cleared: dict[Feature, float] = {}  # the importance up to which a feature is left alone
        self._numbers = itertools.count()
        self._open: dict[int, _SecondCall] = {}  # by number
        self._known: deque[_SecondCall] = deque(maxlen=MOST)

    def agreement(self, branch: str) -> float:
        """Correlation of both judges on the latest completions that were drawn by lot; NaN where it is undefined."""
        drawn = [call for call in self._known if call.is_by_lot and call.written.branch == branch]
        try:
            return statistics.correlation([call.written.score for call in drawn], [call.second for call in drawn])
        except statistics.StatisticsError:
            return math.nan

    def add(self, written: Sequence[Written], size: int) -> dict[int, int]:
        """A batch of training: `size` completions, of which these are looked at. Returns what the second judge is to
        score: a number for each, and its place in `written`."""
        self._calls += self._settings.share * size
        self._by_lot += self._settings.share * size * RANDOM
        self._free += OF_EACH_BATCH
        features = [self._rising.features(completion.text) for completion in written]
        asked = self._choose(written, features)  # by what was known before, so that chance does not choose them
        self._rising.add(written, features)
        self._look_for_suspects()
        return asked

    def add_scores(self, scores: Mapping[int, float | None]) -> None:
        """Scores by the numbers of `add`. `None` is a call that failed: it counts for nothing."""
        for number, score in scores.items():
            call = self._open.pop(number)
            if score is None:
                continue
            call.second = score
            for feature in call.tested:
                if feature in self._suspects:
                    self._wager(feature, call)
            self._known.append(call)

    def _choose(self, written: Sequence[Written], features: Sequence[Features]) -> dict[int, int]:
        """Completions by lot, and some that have what is suspect, the most important of that first."""
        asked = dict[int, int]()
        chosen: dict[int, bool] = {}  # place, and whether by lot
        while self._by_lot >= 1 and self._calls >= 1 and written:
            self._by_lot, self._calls = self._by_lot - 1, self._calls - 1
            chosen[self._rng.randrange(len(written))] = True
        lots, limit = self._rng.sample(range(len(written)), len(written)), len(chosen) + MOST_AT_ONCE
        for feature in self._suspects:
            for place in lots:
                if self._calls < 1 or len(chosen) == limit:
                    break
                if feature in features[place] and place not in chosen:
                    chosen[place] = False
                    self._calls -= 1
        for place, is_by_lot in chosen.items():
            tested = [feature for feature in self._suspects if feature in features[place]]
            number = next(self._numbers)
            asked[number] = place
            self._open[number] = _SecondCall(written[place], features[place], tested, is_by_lot)
        return asked

    def _look_for_suspects(self) -> None:
        """Take up what rises and is rewarded, the most important of it. Each gets half of the capital that is free,
        and gives it back when it is displaced or does not rise any more."""
        rises, cleared = self._rising.found(), self._cleared
        taken = [feature for feature, rise in rises.items() if rise.importance >= cleared.get(feature, 0.0)][:SUSPECTS]
        before, self._suspects = self._suspects, {}
        self._free += sum(suspect.capital for feature, suspect in before.items() if feature not in taken)
        for feature in taken:
            if (suspect := before.get(feature)) is None:
                capital = self._free / 2
                self._free -= capital
                suspect = _Suspect(rises[feature], capital, capital * CLEARED)
            suspect.rise = rises[feature]
            self._suspects[feature] = suspect

    def _wager(self, feature: Feature, call: _SecondCall) -> None:
        """Bet on whether the judge likes a completion more than the second one does, compared with those of its branch
        that do not have the feature."""
        scored, branch = self._known, call.written.branch
        others = [other for other in scored if other.written.branch == branch and feature not in other.features]
        if len(others) < FEWEST:
            return
        # 1. By what the second judge's scores are multiplied, and how much both differ anyway.
        spreads = (
            statistics.stdev(other.written.score for other in scored),
            statistics.stdev(other.second for other in scored),
        )
        ratio = min(max((spreads[0] + FLOOR) / (spreads[1] + FLOOR), 0.5), 2.0)
        sd = max(statistics.stdev(other.gap(ratio) for other in scored), FLOOR)
        # 2. The bet.
        suspect = self._suspects[feature]
        suspect.gaps.append(call.gap(ratio) - statistics.fmean(other.gap(ratio) for other in others))
        allowed = max(TOLERANCE, (1 - CONFIRMED) * suspect.rise.worth)
        suspect.capital *= _factor((suspect.gaps[-1] - allowed) / sd)
        # 3. Its end.
        if suspect.capital >= ALARM:
            confirmed, text = suspect.rise.worth - statistics.fmean(suspect.gaps), call.written.text
            alarm = Alarm(what=feature, confirmed=confirmed, example=text, **suspect.rise._asdict())
            self.alarms.append(alarm)
        if suspect.capital >= ALARM or suspect.capital <= suspect.least:
            del self._suspects[feature]
            self._cleared[feature] = AGAIN * suspect.rise.importance
