"""How generation is started, when completions are reported, and what is off says why."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from salesrl_trl.generation.sampler import Sampled, TRLSampler


def sampled(prompts, completions=((7, 8), (9,)), tool_mask=None):
    ids = [list(each) for each in completions]
    return Sampled(generated=([[1], [1, 2]], ids, tool_mask, list(prompts), None, {}, None, []))


def test_greedy_sampling_ends_with_its_block_also_by_an_error():
    settings = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, top_k=0, min_p=0.1, typical_p=0.5)
    before, sampler = settings.to_dict(), TRLSampler(SimpleNamespace(generate=sampled), settings)
    with pytest.raises(ZeroDivisionError), sampler.greedily():
        assert not settings.do_sample
        settings.validate(strict=True)  # an error for each flag that only sampling heeds
        1 / 0  # noqa: B018
    assert settings.to_dict() == before


def test_completions_are_padded_as_trl_pads_them():
    with_tools = sampled(["a", "b"], tool_mask=[[1, 0], [1]])
    tensors = with_tools.padded(pad_token_id=0, multiple=None, device=torch.device("cpu"))
    assert tensors["prompt_ids"].tolist() == [[0, 1], [1, 2]]
    assert tensors["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert tensors["completion_ids"].tolist() == [[7, 8], [9, 0]]
    assert tensors["completion_mask"].tolist() == [[1, 1], [1, 0]]
    assert tensors["tool_mask"].tolist() == [[1, 0], [1, 1]]


def test_a_log_prob_that_vllm_could_not_compute_is_nan():
    logprobs = [[-0.5, None], [-1.0]]
    given = Sampled(generated=([[1], [1]], [[7, 8], [9]], None, [], logprobs, {}, None, []))
    tensors = given.padded(pad_token_id=0, multiple=None, device=torch.device("cpu"))
    expected = torch.tensor([[-0.5, torch.nan], [-1.0, 0.0]])
    torch.testing.assert_close(tensors["sampling_per_token_logps"], expected, equal_nan=True)
