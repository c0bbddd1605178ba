"""The seam for a judge, and the client of judge services: rubrics, which provider is asked, and how several verdicts
become one."""

import asyncio
import hashlib
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from salesrl_trl.data.files import nearest_file, unreadable
from salesrl_trl.errors import BudgetSpent, ConfigError, JudgeInvalid, ServiceError
from salesrl_trl.judged.cache import cache_key
from salesrl_trl.judged.provider import JudgeProvider, Material, ProviderClient
from salesrl_trl.judged.verdict import MESSAGE_VERSION, Candidates
from salesrl_trl.service.event_loop import seconds_or_error
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Action, Answer, JudgeRecord, ProviderUsage, SalesRow, Verdict


class Judge(ABC):
    """Scores answers, whatever it asks. It is handed to `SalesReward` as an object, or named by its dotted path in the
    setting `judge_providers`. Only `judge` has to be written. One with `orders` has `judge_group` too.

        class Shortest(Judge):
            async def judge(self, rubric, row, action, candidate, reference):
                score = 1 / (1 + len(candidate.text) / 400)
                return Verdict(candidate=score, reference=None if reference is None else 0.5, reason="by length")

    One object serves all completions, many at a time, on one event loop. Work that blocks, such as a model on this
    machine, belongs into `asyncio.to_thread`. The object must be picklable, because the reward may run in a process of
    its own. So load a model at the first call, not at construction.
    """

    orders: int = 0  # calls for the completions of a prompt together; 0: each completion is judged alone
    provider_names: tuple[str, ...] = ()
    """Everything with usage of its own, in a fixed order."""
    transports: Mapping[str, Transport] = MappingProxyType({})
    """Everything with traffic of its own, by service name. Their requests count in the run's budget."""

    async def judge_group(
        self, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None
    ) -> Sequence[Verdict]:
        """Score several candidates to one row together, each with the reference beside it: as `judge`, a verdict for
        each candidate. Where it raises a `ServiceError` they are judged one by one, in the time that is left."""
        raise NotImplementedError(f"{type(self).__name__} has `orders`. Expected a method `judge_group`.")

    @abstractmethod
    async def judge(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        """Score the candidate and, beside it, the reference.

        Args:
            rubric (`str`):
                What to judge by: the branch's name, or `<rubric>` of a component `judge_<rubric>`.
            row (`SalesRow`):
                The conversation, its branch and the documents known to answer it.
            action (`Action`):
                What the policy wrote.
            candidate (`Answer`):
                The 8B endpoint's answer to the action.
            reference (`Answer`, *optional*):
                The 32B endpoint's answer, where there is one. It has a score exactly where it is there.

        Raises:
            `JudgeInvalid`: answers that are no verdict.
            `ServiceError`: no answer.
        """

    def identity(self, rubric: str) -> str:
        """A hash of everything that decides a verdict beside the material, for cache keys. No credential. By default
        the class and the rubric's name: one whose verdicts depend on more, such as a model's file, adds it."""
        return cache_key("judge", *self.places.values(), rubric)

    @property
    def places(self) -> Mapping[str, str]:
        """The model and address of each service, by its name, for messages. Reason codes begin with that name."""
        return {"judge": f"{type(self).__module__}.{type(self).__qualname__}"}

    def drain_usage(self) -> dict[str, ProviderUsage]:
        """Usage by provider, since the last time."""
        return {}

    def drain_records(self) -> Sequence[JudgeRecord]:
        """Every valid verdict since the last time."""
        return ()

    async def warm_up(self, row: SalesRow, action: Action, answer: Answer) -> Mapping[str, float | ServiceError]:
        """Ask for one verdict. Returns by service name the seconds it took, or what went wrong."""
        asked = await seconds_or_error(judged(self, row.branch, row, [(action, answer)], answer))
        return dict.fromkeys(self.places, asked)

    async def aclose(self) -> None:  # noqa: B027  for those that have something to close
        """Close what belongs to the running event loop. The next call opens it again."""


async def judged(
    judge: Judge, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None
) -> Sequence[Verdict]:
    """The verdicts on one alone, or on several together. Raises as `Judge.judge` does."""
    if len(candidates) > 1:
        verdicts = await judge.judge_group(rubric, row, candidates, reference)
    else:
        verdicts = [await judge.judge(rubric, row, *candidates[0], reference)]
    check_verdicts(len(candidates), reference is not None, verdicts)
    return verdicts


def check_verdicts(count: int, expect_reference: bool, verdicts: Sequence[Verdict]) -> None:
    if len(verdicts) != count:
        raise JudgeInvalid(f"{len(verdicts)} verdicts on {count} candidates", code="judge_wrong_candidates")
    if any((verdict.reference is not None) != expect_reference for verdict in verdicts):
        raise JudgeInvalid("the verdict is of other material", code="judge_no_reference")


AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
}
"""How the verdicts of several repeats become one."""


def load_rubrics(names: Sequence[str], directory: str | None = None, *, direct: bool = False) -> dict[str, str]:
    """Rubrics by name: `<name>.txt` in `directory`, else the packaged one. `direct`: as in `packaged_rubrics`."""
    paths = packaged_rubrics(direct)
    folder = Path(directory).expanduser() if directory else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"`rubric_dir` is {directory!r}, which is no folder.{nearest_file(folder)} Correct it.")
    if folder is not None:
        paths |= {name: folder / f"{name}.txt" for name in names if (folder / f"{name}.txt").is_file()}
    if lacking := [f"{name}.txt" for name in names if name not in paths]:
        raise ConfigError(
            f"rubrics are missing: {', '.join(lacking)}. Expected a text file for each branch and each "
            f"`judge_<rubric>`, in {directory or 'a folder named by `rubric_dir`'}. Write them, or correct `branches` "
            "or `branch_reward_weights`."
        )
    rubrics = {}
    for name in names:
        path = paths[name]
        try:
            rubrics[name] = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the rubric {path} can't be read ({unreadable(error)}). Expected UTF-8 text.") from None
        if not rubrics[name].strip():
            raise ConfigError(f"the rubric {path} is empty. Expected the instructions for the judge.")
    return rubrics


def packaged_rubrics(direct: bool = False) -> dict[str, Path]:
    """The rubrics that come with the package, by name. `direct`: for a policy that answers without an action."""
    folder = Path(str(resources.files("salesrl_trl.judged") / "rubrics"), "direct" if direct else "")
    return {path.stem: path for path in folder.glob("*.txt")}


class JudgeClient(Judge):
    """Asks one of several OpenAI-compatible models for a verdict.

    The weights decide which provider is asked first, the same one for the same material. If it fails or gives no valid
    verdict, the others follow as they are listed. `repeats` are verdicts on a completion; with `orders` those of a
    prompt are judged together, so often. If more than half are valid, `aggregation` makes one verdict of them.
    """

    def __init__(
        self, providers: Sequence[JudgeProvider], rubrics: Mapping[str, str], *, repeats: int = 1,
        aggregation: str = "mean", orders: int = 0,
    ) -> None:  # fmt: skip
        self.orders = orders
        self.providers = {provider.name: ProviderClient(provider) for provider in providers}
        """By name, in fallback order."""
        self.provider_names = tuple(self.providers)
        self.transports = {provider.transport.service: provider.transport for provider in providers}
        self._all = [*self.providers.values()]
        self._rubrics = rubrics
        self._repeats = repeats
        self._aggregation = aggregation
        self._records: list[JudgeRecord] = []

    def identity(self, rubric: str) -> str:
        asked = [
            (
                provider.base_url, provider.model, provider.weight, provider.temperature,
                provider.max_completion_tokens, provider.response_format, dict(provider.extra_body),
            )
            for provider in (client.settings for client in self._all)
        ]  # fmt: skip
        return cache_key("judge", MESSAGE_VERSION, asked, self._rubrics[rubric], self._repeats, self._aggregation)

    async def judge(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        [verdict] = await self._judged(self.material(rubric, row, [(action, candidate)], reference), self._repeats)
        return verdict

    async def judge_group(
        self, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None
    ) -> list[Verdict]:
        return await self._judged(self.material(rubric, row, candidates, reference), self.orders)

    async def _judged(self, material: Material, times: int) -> list[Verdict]:
        asked = (self._first_valid(material, order, number) for number, order in enumerate(material.orders(times)))
        return self._merge(await asyncio.gather(*asked, return_exceptions=True))

    def material(self, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None) -> Material:
        return Material(rubric, self._rubrics[rubric], row, candidates, reference)

    def drain_usage(self) -> dict[str, ProviderUsage]:
        return {name: provider.drain_usage() for name, provider in self.providers.items()}

    def drain_records(self) -> list[JudgeRecord]:
        records, self._records = self._records, []
        return records

    @property
    def places(self) -> dict[str, str]:
        return {
            provider.settings.transport.service: f"model {provider.settings.model} at {provider.settings.base_url}"
            for provider in self._all
        }

    async def warm_up(self, row: SalesRow, action: Action, answer: Answer) -> dict[str, float | ServiceError]:
        material = self.material(row.branch, row, [(action, answer)], answer)
        asked = [provider.ask(material, order=(0, 1), patient=True) for provider in self._all]
        results = await asyncio.gather(*map(seconds_or_error, asked))
        self.drain_usage()
        return dict(zip(self.transports, results, strict=True))

    async def aclose(self) -> None:
        for provider in self._all:
            await provider.http.aclose()

    async def _first_valid(self, material: Material, order: Sequence[int], number: int) -> list[Verdict]:
        lot = hashlib.sha256(f"{material.key} {number}".encode()).digest()
        providers = self._order(int.from_bytes(lot[:8]) / 2**64)
        failures: list[ServiceError] = []
        for provider in providers:
            try:
                verdicts = await provider.ask(material, order=order, patient=provider is providers[-1])
            except ServiceError as error:
                failures.append(error)
                continue
            for place, verdict in enumerate(verdicts):
                behind = 2 * order.index(place) + 1 - len(order)  # above 0 in the second half
                first = None if behind == 0 else behind < 0
                self._records.append(JudgeRecord(score=verdict.candidate, candidate_first=first))
            return [replace(verdict, provider=provider.settings.name) for verdict in verdicts]
        # An invalid verdict says more than a provider that was down. One that was not asked says nothing.
        worth = {error: isinstance(error, JudgeInvalid) - isinstance(error, BudgetSpent) for error in failures}
        raise max(reversed(failures), key=worth.__getitem__)

    def _order(self, lot: float) -> list[ProviderClient]:
        """The provider that the lot in [0, 1) falls to, then the others as they are listed."""
        providers = [provider for provider in self._all if not provider.settings.transport.is_spent] or self._all
        place = lot * sum(provider.settings.weight for provider in providers)
        for index, provider in enumerate(providers):
            place -= provider.settings.weight
            if place < 0:
                return [provider, *providers[:index], *providers[index + 1 :]]
        return providers

    def _merge(self, results: Sequence[list[Verdict] | BaseException]) -> list[Verdict]:
        valid = [result for result in results if not isinstance(result, BaseException)]
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, ServiceError):
                raise error
        if 2 * len(valid) <= len(results):
            raise errors[0]
        merge = AGGREGATIONS[self._aggregation]
        merged = []
        for verdicts in zip(*valid, strict=True):
            references = [verdict.reference for verdict in verdicts if verdict.reference is not None]
            of_criteria = zip(*(verdict.criteria for verdict in verdicts), strict=True)
            merged.append(
                replace(
                    verdicts[0],
                    candidate=merge([verdict.candidate for verdict in verdicts]),
                    reference=merge(references) if references else None,
                    criteria=[merge(scores) for scores in of_criteria],
                )
            )
        return merged
