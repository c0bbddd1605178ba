"""Whether every rank can score, before anything waits for its services.

Owns what the ranks conclude together, for `train`, `evaluate` and the simulation. How a service is asked belongs to
`warm_up`.
"""

import logging
from collections.abc import Callable

from accelerate import PartialState
from accelerate.utils import gather_object

from salesrl_trl.errors import ServiceError, ServiceUnavailable
from salesrl_trl.reward.reward_loop import RewardLoop

logger = logging.getLogger(__name__)


def warm_up(reward_loop: RewardLoop, report: Callable[[str], object] = logger.info) -> None:
    """Ask every service once, and report how long it took; a collective.

    Raises `ServiceUnavailable` if the 8B endpoint, or every judge, did not answer; on all ranks alike.
    """
    answers: dict[str, float | ServiceError] = {}
    try:
        answers = reward_loop.warm_up()
        unusable = [str(error) for error in reward_loop.reward.names.unusable(answers)]
    except ServiceError as error:  # of the reward process itself: the other ranks wait below
        unusable = [str(error)]
    figures = [answer.code if isinstance(answer, ServiceError) else answer for answer in answers.values()]
    everywhere, failures = gather_object([figures]), gather_object(unusable)
    if PartialState().is_main_process and all(everywhere):
        for name, *results in zip(answers, *everywhere, strict=True):
            codes = sorted({result for result in results if isinstance(result, str)})
            report(f"[WarmUp] {name}: {', '.join(codes) if codes else f'{max(results):.2f} s'}")
    if failures:
        raise ServiceUnavailable(
            f"the services did not pass their warm-up, so nothing could be scored: {failures[0]} Mend the service and "
            "launch again (`warm_up_services: false` leaves the check out)."
        )
