"""The stage `tokenizer`: does a completion begin and end where the chat template says?"""

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from salesrl_trl.build.plan import Plan
from salesrl_trl.errors import ConfigError
from salesrl_trl.preflight.stage import Findings

_ANSWER = "salesrl"
"""An answer in a rendered conversation. The template's end of a turn follows it."""


class TokenizerStage:
    """Tokens that end a completion, the model's sampling flags, the template's generation prompt."""

    name = "tokenizer"
    needs: tuple[str, ...] = ("config",)

    def run(self, plan: Plan) -> Findings:
        findings, tokenizer, kwargs = Findings(), plan.tokenizer, plan.config.training.chat_template_kwargs or {}
        generation = plan.generation_config
        listed = generation.eos_token_id
        ends = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
        unknown = [each for each in sorted(ends) if each >= len(tokenizer)]
        if unknown:
            raise ConfigError(
                f"The model's generation_config.json has the end tokens {unknown}, and the tokenizer {len(tokenizer)} "
                "tokens. Expected tokens of the tokenizer. Put the tokenizer's files of the same model beside it."
            )
        findings.figures["end_tokens"] = ", ".join(tokenizer.convert_ids_to_tokens(sorted(ends)))
        if ends:
            _check_end_of_turn(tokenizer, ends, kwargs, findings)
        else:
            findings.fail(
                "Neither the tokenizer nor the model's generation_config.json has an end token: every completion "
                "would be cut off at `max_completion_length`.",
                "Set `eos_token` in tokenizer_config.json to the token that ends a turn of the chat template.",
            )
        _check_generation_prompt(tokenizer, kwargs, findings)
        _check_sampling(generation, findings)
        _check_vocabulary(plan.model_config, len(tokenizer), findings)
        return findings


def _check_end_of_turn(
    tokenizer: PreTrainedTokenizerBase, ends: set[int], kwargs: dict[str, object], findings: Findings
) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, **kwargs)
    behind = tokenizer(text.rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = next((token for token in behind if token in tokenizer.added_tokens_decoder), None)
    token = None if special is None else tokenizer.convert_ids_to_tokens(special)
    findings.figures["end_of_turn"] = token
    if ends.intersection(behind):
        return
    names = findings.figures["end_tokens"]
    if token is not None:
        findings.fail(
            f"The chat template ends a turn with {token}, which ends no completion: only {names} does. Completions "
            "would run on to `max_completion_length`.",
            f"Add {special} to `eos_token_id` in the model's generation_config.json, or set `eos_token` to {token} "
            "in tokenizer_config.json.",
        )
    else:
        findings.note(
            f"The chat template puts no end token ({names}) behind an answer, so that a policy may not know where to "
            "end.",
            "Use an instruct model's own template, or watch `completions/clipped_ratio` in the first steps.",
        )


def _check_generation_prompt(
    tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, object], findings: Findings
) -> None:
    turns = [{"role": "user", "content": _ANSWER}]
    without = tokenizer.apply_chat_template(turns, tokenize=False, **kwargs)
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **kwargs)
    if prompt == without:
        findings.note(
            "The chat template has no generation prompt: `add_generation_prompt` changes nothing, so the policy may "
            "go on with the customer's turn.",
            "Check that the template marks where the answer begins, as [/INST] does.",
        )
    elif not prompt.startswith(without):
        findings.note(
            "The chat template changes earlier text when it adds its generation prompt. Expected it at the end alone.",
            "Correct chat_template.jinja, or use the instruct model's own.",
        )
    findings.figures["generation_prompt"] = repr(prompt.removeprefix(without))


def _check_sampling(generation: GenerationConfig, findings: Findings) -> None:
    """A model with flags that contradict each other is sampled from without a word, and refused when it is saved."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        findings.fail(
            "The model's generation_config.json contradicts itself, and transformers refuses to save such a model: "
            + " ".join(str(error).split()),
            "Correct that file: with temperature, top_p or top_k it wants `do_sample: true`.",
        )


def _check_vocabulary(model: PretrainedConfig, tokens: int, findings: Findings) -> None:
    rows = getattr(model.get_text_config(), "vocab_size", None)
    if rows is not None and tokens > rows:
        findings.fail(
            f"The tokenizer has {tokens} tokens, and the model embeddings for {rows}. Expected no more tokens than "
            "embeddings.",
            "Use the tokenizer that was saved with the model, or resize the model's embeddings and save it.",
        )
