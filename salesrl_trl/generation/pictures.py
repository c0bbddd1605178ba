"""Prompts with pictures, between TRL and vLLM.

Owns the tokens that stand for a picture in a prompt. Refuses to know pixels.
"""

from collections.abc import Sequence

from salesrl_trl.errors import ConfigError


def one_token_each(ids: Sequence[int], image_token: int) -> list[int]:
    """A prompt with one token for each picture, as vLLM wants it: it puts in those of the picture itself.

    TRL 1.16 gives a colocated vLLM the prompt with the tokens of its pictures, and the pictures. vLLM then takes the
    first of these tokens for the place of the picture, and puts in all of them once more (huggingface/trl#6294).

    `ids`: token ids, with a run of `image_token` for each picture. `image_token`: the token that stands for a part of
    a picture.
    """
    return [each for place, each in enumerate(ids) if not (place and ids[place - 1] == each == image_token)]


def check_expanded(seen: Sequence[Sequence[int]], meant: Sequence[Sequence[int]]) -> None:
    """Raise `ConfigError` unless vLLM sampled from the prompts that the policy is trained on."""
    for place, (ids, expected) in enumerate(zip(seen, meant, strict=True)):
        if list(ids) != list(expected):
            raise ConfigError(
                f"vLLM reads the pictures of prompt {place} as {len(ids)} tokens with the text, and the trainer as "
                f"{len(expected)}: completions would come from another prompt than they are trained on. Expected "
                "the same processor on both sides, and a model whose pictures are one run of image tokens each. Leave "
                "`mm_processor_kwargs` out of `vllm_engine_kwargs`, or set `use_vllm: false`."
            )
