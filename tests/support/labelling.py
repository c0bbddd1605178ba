"""vLLM 0.33's labels of weights on an older vLLM, as its `OutputProcessor` counts them."""

from types import SimpleNamespace

from vllm.outputs import CompletionOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor, RequestState


def label_outputs():
    """Make this process's engines report `weight_versions`, unless they do."""
    if hasattr(CompletionOutput, "weight_versions"):
        return
    process, complete = OutputProcessor.process_outputs, RequestState._new_completion_output

    def set_weight_version(self, weight_version):
        self.output_processor.label = weight_version

    def processed(self, engine_core_outputs, *args, **kwargs):
        label = getattr(self, "label", "default")
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is not None and output.new_token_ids:
                starts = vars(state).setdefault("starts", [])
                if not starts or starts[-1][0] != label:
                    starts.append((label, state.detokenizer.num_output_tokens()))
        return process(self, engine_core_outputs, *args, **kwargs)

    def completed(self, *args, **kwargs):
        output = complete(self, *args, **kwargs)
        starts = vars(self).get("starts", [])
        ends = [*(start for _, start in starts[1:]), self.detokenizer.num_output_tokens()]
        output.weight_versions = [
            SimpleNamespace(version=label, start=start, end=end)
            for (label, start), end in zip(starts, ends, strict=True)
        ] if starts else None  # fmt: skip
        return output

    LLMEngine.set_weight_version, CompletionOutput.weight_versions = set_weight_version, None
    OutputProcessor.process_outputs, RequestState._new_completion_output = processed, completed
