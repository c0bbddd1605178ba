"""Settings of how a run loads and computes do not change what it learns."""

import pytest
from support.keyed import check_same_course

from salesrl_trl.types import DEFAULT_BRANCHES

SHORT = {"branches": DEFAULT_BRANCHES * 3, "max_steps": 4}
"""Three steps of an epoch, and one of the next."""
WORKERS = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(train):
    return train(**SHORT)


def test_a_worker_of_the_loader_keeps_the_order_of_prompts_over_epochs_and_with_a_lookahead(train, plain):
    check_same_course(plain, train(**SHORT, **WORKERS))
    ahead = {**SHORT, "rollout_lookahead": 2}
    check_same_course(train(**ahead), train(**ahead, **WORKERS, dataloader_persistent_workers=True))


@pytest.mark.parametrize("kept", [0.0, 1e-4])  # the policy's only layer is recomputed, or kept
def test_gradient_checkpointing_and_an_emptied_cache_give_the_same_losses(train, plain, kept):
    again = {"gradient_checkpointing": True, "kept_activations_gib": kept, "torch_empty_cache_steps": 2}
    check_same_course(plain, train(**SHORT, **again))


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # both of torch's own
def test_a_compiled_policy_has_the_same_losses(train):
    few = {**SHORT, "max_steps": 1}
    compiled = train(**few, torch_compile=True, torch_compile_backend="eager")
    for one, other in zip(train(**few)["steps"], compiled["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
