"""Several requests for one call: which one counts."""

import asyncio

import pytest

from salesrl_trl.reward.service.flights import _Flight


@pytest.mark.parametrize("good", [0, 1, None])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_answer_counts_also_where_a_failure_comes_at_the_same_moment(order, good):
    """Both have ended when the first of them is looked at."""

    async def run():
        loop, beside = asyncio.get_running_loop(), []
        answers = [loop.create_future() for _ in range(2)]
        left = iter(answers)

        async def attempt():
            return await next(left)

        flight = _Flight(attempt, 1, lambda error, number: beside.append(number))
        flight.send(2)
        await asyncio.sleep(0)
        for place in order:
            if place == good:
                answers[place].set_result("an answer")
            else:
                answers[place].set_exception(ValueError(str(place)))
        try:
            result = await asyncio.wait_for(flight.result, 10)
        except ValueError as error:
            result = str(error)
        return result, beside, flight.won_by_hedge

    result, beside, won_by_hedge = asyncio.run(run())
    if good is None:
        assert (result, beside) == (str(order[1]), [order[0] + 1])  # one is told of, the other raised
    else:
        assert (result, won_by_hedge) == ("an answer", good == 1)
        assert beside == ([] if order[0] == good else [order[0] + 1])
