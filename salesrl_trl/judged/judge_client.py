"""The judge's client: which provider is asked, and how several verdicts become one.

Owns rubrics, the order and weights of providers, repeats and their aggregation. `launch.assembly` makes it.
"""

import asyncio
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path

from salesrl_trl.data.files import nearest_file, unreadable
from salesrl_trl.errors import BudgetSpent, ConfigError, JudgeInvalid, ServiceError
from salesrl_trl.judged.cache import cache_key
from salesrl_trl.judged.judge_interface import Candidates, Judge
from salesrl_trl.judged.provider import JudgeProvider, Material, ProviderClient
from salesrl_trl.judged.verdict import MESSAGE_VERSION
from salesrl_trl.service.event_loop import seconds_or_error
from salesrl_trl.types import Action, Answer, JudgeRecord, ProviderUsage, SalesRow, Verdict

AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
}
"""How the verdicts of several repeats become one."""


def load_rubrics(names: Sequence[str], directory: str | None = None, *, direct: bool = False) -> dict[str, str]:
    """Rubrics by name: `<name>.txt` in `directory`, else the packaged one. `direct`: as in `packaged_rubrics`."""
    packaged = packaged_rubrics(direct)
    folder = Path(directory).expanduser() if directory else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"`rubric_dir` is {directory!r}, which is no folder.{nearest_file(folder)} Correct it.")
    paths = {
        name: folder / f"{name}.txt" if folder and (folder / f"{name}.txt").is_file() else packaged.get(name)
        for name in names
    }
    lacking = [f"{name}.txt" for name, path in paths.items() if path is None]
    if lacking:
        raise ConfigError(
            f"rubrics are missing: {', '.join(lacking)}. Expected a text file for each branch and each "
            f"`judge_<rubric>`, in {directory or 'a folder named by `rubric_dir`'}. Write them, or correct `branches` "
            "or `branch_reward_weights`."
        )
    rubrics = {}
    for name, path in paths.items():
        assert path is not None
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

    The weights decide which provider is asked first. It is the same provider for the same material. If it fails or
    gives no valid verdict, the others follow in the order in which they are listed.

    With `orders` the completions of a prompt are judged together, once in each of so many orders.

    A rubric is the system message of its judge; a branch's rubric has the branch's name. With several `repeats` the
    order of candidate and reference alternates. If more than half of the repeats are valid, `aggregation`, a key of
    `AGGREGATIONS`, makes one verdict of them.
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
        asked = [
            (
                (provider.base_url, provider.model, provider.weight),
                (
                    provider.temperature, provider.max_completion_tokens, provider.response_format,
                    dict(provider.extra_body),
                ),
            )
            for provider in providers
        ]  # fmt: skip
        self._identities = {
            name: cache_key("judge", MESSAGE_VERSION, asked, rubric, repeats, aggregation)
            for name, rubric in rubrics.items()
        }
        self._records: list[JudgeRecord] = []

    def identity(self, rubric: str) -> str:
        return self._identities[rubric]

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
        """Everything that a provider is asked about. Arguments as in `Judge.judge_group`."""
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
        """Ask every provider once, by the branch's rubric. Returns seconds, or the error, by service name."""
        material = self.material(row.branch, row, [(action, answer)], answer)
        asked = [partial(provider.ask, material, order=(0, 1), patient=True) for provider in self._all]
        results = await asyncio.gather(*map(seconds_or_error, asked))
        self.drain_usage()
        return dict(zip(self.transports, results, strict=True))

    async def aclose(self) -> None:
        for provider in self._all:
            await provider.http.aclose()

    async def _first_valid(self, material: Material, order: Sequence[int], number: int) -> list[Verdict]:
        lot = hashlib.sha256(f"{material.key} {number}".encode()).digest()
        providers = self._order(int.from_bytes(lot[:8]) / 2**64)
        failure: ServiceError | None = None
        for provider in providers:
            try:
                verdicts = await provider.ask(material, order=order, patient=provider is providers[-1])
            except ServiceError as error:
                # An invalid verdict says more than a provider that was down. One that was not asked says nothing.
                is_less = isinstance(failure, JudgeInvalid) or isinstance(error, BudgetSpent)
                failure = failure if failure is not None and is_less else error
                continue
            for place, (verdict, (_, answer)) in enumerate(zip(verdicts, material.candidates, strict=True)):
                behind = 2 * order.index(place) + 1 - len(order)  # above 0 in the second half
                first = None if behind == 0 else behind < 0
                record = JudgeRecord(score=verdict.candidate, chars=len(answer.text), candidate_first=first)
                self._records.append(record)
            return [replace(verdict, provider=provider.settings.name) for verdict in verdicts]
        assert failure is not None
        raise failure

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
        """One verdict on each candidate, of those of all requests."""
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
