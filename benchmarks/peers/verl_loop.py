"""verl's agent loop of one turn, whose completions have drawn lengths. Imported by verl's workers."""

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from benchmarks.peers.verl_arm import drawn_length


class DrawnLength(SingleTurnAgentLoop):
    """Each completion is as long as `benchmarks.lengths` draws it."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        sampling = drawn_length(sampling_params, kwargs.get("index", 0), kwargs.get("session_id"))
        return await super().run(sampling, priority, **kwargs)
