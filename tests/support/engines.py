"""vLLM's `LLM` without a model."""

from itertools import groupby
from types import SimpleNamespace


class Engine:
    """A request takes as many steps as its prompt's first token says, and samples its own number."""

    def __init__(self):
        self.left, self.salts, self.asked, self.fails = {}, {}, [], None

    def add_request(self, request_id, prompt, params):
        if prompt["prompt_token_ids"] == []:
            raise ValueError("the prompt is empty")
        self.left[request_id], self.salts[request_id] = prompt["prompt_token_ids"][0], prompt.get("cache_salt")
        self.asked.append((prompt["prompt_token_ids"], params))
        return f"{request_id}-inside"

    def step(self):
        if self.fails is not None:
            raise self.fails
        outputs = []
        for request_id in [*self.left]:
            self.left[request_id] -= 1
            sampled = [SimpleNamespace(token_ids=[int(request_id)], logprobs=None)]
            given = {"request_id": request_id, "finished": not self.left[request_id], "prompt_token_ids": [7]}
            outputs.append(SimpleNamespace(**given, outputs=sampled))
            if not self.left[request_id]:
                del self.left[request_id]
        return outputs

    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.left[request_id]

    def has_unfinished_requests(self):
        return bool(self.left)


class LabellingEngine(Engine):
    """As vLLM 0.33: the last output of a request has the weights' label at the time of each token. A token is the
    number of the `weights` that sampled it. With `async_scheduling` a step returns what the one before it sampled."""

    def __init__(self, async_scheduling):
        super().__init__()
        self.weights, self.label, self.sampled, self.in_flight = 0, "default", {}, []
        scheduler = SimpleNamespace(async_scheduling=async_scheduling)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)

    def set_weight_version(self, weight_version):
        self.label = weight_version

    def step(self):
        pending = [request for batch in self.in_flight for request, _ in batch]
        due = [request for request, left in self.left.items() if left > pending.count(request)]
        self.in_flight.append([(request, self.weights) for request in due])
        if self.vllm_config.scheduler_config.async_scheduling and len(self.in_flight) < 2:
            return []
        for request, weights in self.in_flight.pop(0):
            self.sampled.setdefault(request, []).append((weights, self.label))
            self.left[request] -= 1
        return [self._ended(request) for request in [*self.left] if not self.left[request]]

    def _ended(self, request):
        del self.left[request]
        sampled, spans, start = self.sampled.pop(request), [], 0
        for label, of in groupby(label for _, label in sampled):
            end = start + len([*of])
            spans.append(SimpleNamespace(version=label, start=start, end=end))
            start = end
        made = SimpleNamespace(token_ids=[weights for weights, _ in sampled], logprobs=None, weight_versions=spans)
        return SimpleNamespace(request_id=request, finished=True, prompt_token_ids=[7], outputs=[made])


class LLM:
    """Numbers its requests from 0."""

    def __init__(self, engine=None):
        self.llm_engine, self.count = engine or Engine(), 0

    def enqueue(self, prompts, sampling_params, use_tqdm):
        added = []
        try:
            for prompt in prompts:
                added.append(str(self.count))
                self.count += 1
                self.llm_engine.add_request(added[-1], prompt, sampling_params)
        except ValueError:
            self.llm_engine.abort_request(added[:-1])
            raise

    def generate(self, prompts, sampling_params, use_tqdm=False):
        self.enqueue(prompts, sampling_params, use_tqdm)
        outputs = []
        while self.llm_engine.has_unfinished_requests():
            outputs += [output for output in self.llm_engine.step() if output.finished]
        return outputs

    def reset_prefix_cache(self):
        return "reset"


def prompts(*steps):
    return [{"prompt_token_ids": [each]} for each in steps]
