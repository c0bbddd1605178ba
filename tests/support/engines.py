"""vLLM's `LLM` without a model."""

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


class LLM:
    """Numbers its requests from 0."""

    def __init__(self):
        self.llm_engine, self.count = Engine(), 0

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
