"""Every service asked once, before anything depends on it. Called by the chain's `warm_up`.

Owns what is asked then, and what is logged of an empty index and of references that an earlier run kept.
"""

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence

from salesrl_trl.errors import ServiceError
from salesrl_trl.reward.judge.judge_interface import Judge
from salesrl_trl.reward.rag.rag_answers import RagAnswers
from salesrl_trl.reward.service.event_loop import clocked
from salesrl_trl.types import Answer, SalesRow

logger = logging.getLogger(__name__)

_NO_ANSWER = Answer(text="No answer.", passages=(), took_ms=0.0)


async def ask_every_service(
    row: SalesRow, answers: RagAnswers, judge: Judge | None, announces: bool
) -> dict[str, float | ServiceError]:
    """Ask both RAG endpoints about a row, then the judge, if any branch needs one, about their answer.

    Returns by service the seconds its answer took, or what went wrong. `announces` says whether this is the process
    that logs what it finds.
    """
    action = answers.plain_action(row.conversation[-1].content)
    results = await asyncio.gather(
        clocked(functools.partial(answers.ask_8b, row, action)), clocked(functools.partial(answers.ask_32b, row))
    )
    seconds: dict[str, float | ServiceError] = {
        name: result if isinstance(result, ServiceError) else result[1]
        for name, result in zip(answers.backend.transports, results, strict=True)
    }
    judged = next((result[0] for result in results if not isinstance(result, ServiceError)), _NO_ANSWER)
    if judge is not None:
        seconds.update(await judge.warm_up(row, action, judged))
    if not isinstance(results[0], ServiceError) and not results[0][0].passages:
        await _warn_of_an_empty_index(row, answers, announces)
    return seconds


async def compare_references(rows: Sequence[SalesRow], answers: RagAnswers, announces: bool) -> None:
    """Compare some of the references that an earlier run kept with fresh ones, and forget them all where they differ.

    `rows` are those whose references are used."""
    line = await answers.compare_references(rows)
    if announces and line is not None:
        text, is_warning = line
        logger.log(logging.WARNING if is_warning else logging.INFO, f"[References] {text}")


def add_places(results: Mapping[str, object], places: Mapping[str, str]) -> None:
    """Let each error's message say where its service is."""
    for name, result in results.items():
        if isinstance(result, ServiceError):
            result.args = (f"{result} ({name}: {places[name]})",)


async def _warn_of_an_empty_index(row: SalesRow, answers: RagAnswers, announces: bool) -> None:
    result = await clocked(functools.partial(answers.index_has_some, row))
    if not isinstance(result, ServiceError) and not result[0] and announces:
        logger.warning(
            f"[RAG] {answers.backend.identity} finds nothing for the first row, not even without a threshold: look "
            "whether its index is loaded, and whether it knows the rows' tenant_id. Such rows are not scored "
            "(`no_passages`)."
        )
