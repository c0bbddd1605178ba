"""The policy while TRL builds its trainer: loaded by TRL or given, looked at, and handed to vLLM.

Owns what has to be known of the policy before TRL puts an adapter on it, and the options that vLLM's engine gets.
"""

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedModel

from salesrl_trl.checkpoint.identity import shape_of, weights_of
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.engine import Start, compiled_engine, engine_options, engine_start
from salesrl_trl.config.rollouts import sampling_hints
from salesrl_trl.generation import compiled
from salesrl_trl.generation.vllm import has_tied_head, vllm_engine_options
from salesrl_trl.kl.reference import Loaded, reference_wanted
from salesrl_trl.update.weights import WeightCheck


class Policy:
    """The policy of one trainer. `has_kl`: the loss has a KL, so that a reference is needed. `gets_adapter`: TRL will
    put an adapter on the model."""

    weight_check: WeightCheck
    """Compares vLLM's weights with those in training, once."""
    first_weights: str | None
    """A digest of the weights of the reference policy, or of an adapter's base: a resumed run must have the same."""
    shape: str
    """Number of weights, and a digest of their names and shapes."""

    def __init__(self, args: SalesGRPOConfig, has_kl: bool, gets_adapter: bool) -> None:
        self._args = args
        self._has_kl = has_kl
        self._gets_adapter = gets_adapter

    @contextlib.contextmanager
    def building(self, model: PreTrainedModel | str) -> Iterator[None]:
        """While active, a TRL trainer under construction gets our engine options and reference policy. `model`: the
        policy, or its id, by which TRL loads it."""
        args, policy = self._args, Loaded(model, self._look)
        options = lambda: engine_options(args, policy.model)  # noqa: E731  the model may not be there yet
        with vllm_engine_options(options), reference_wanted(args, self._has_kl, policy):
            yield
        is_compiled = args.use_vllm and args.vllm_mode == "colocate" and engine_start(args) is Start.COMPILED
        if args.compiled is not None and is_compiled:
            compiled.keep_engine(args.compiled, compiled_engine(args, policy.model.name_or_path))

    def _look(self, model: PreTrainedModel) -> None:
        args = self._args
        self.weight_check = WeightCheck(args.max_sampling_logp_difference, sampling_hints(args, has_tied_head(model)))
        has_base = self._has_kl or self._gets_adapter or hasattr(model, "peft_config")
        self.first_weights = weights_of(model.named_parameters()) if has_base else None
        self.shape = shape_of(model.named_parameters())
