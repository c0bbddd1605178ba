"""Whether weights move, and what is said of it; and how log-probs of two sources are compared."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, PartialState
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, TrainerControl

from salesrl_trl.errors import ConfigError, WeightSyncError
from salesrl_trl.parts.weight_change import WeightChange
from salesrl_trl.update.weights import WeightCheck, logp_difference, raise_adapters

NAN = math.nan


@pytest.fixture(autouse=True)
def _one_process():
    PartialState(cpu=True)


class Run:
    """Steps of an optimizer with the callback beside it, as transformers calls it."""

    def __init__(self, optimizer, model):
        self.optimizer, self.step = optimizer, 0
        self.args = SimpleNamespace(learning_rate=optimizer.param_groups[0]["lr"])
        self.callback = WeightChange()
        self.callback.connect(SimpleNamespace(trl=SimpleNamespace(accelerator=Accelerator(cpu=True))))
        # wrapped, as accelerate and DeepSpeed do
        wrapped = SimpleNamespace(optimizer=optimizer)
        self.callback.on_train_begin(self.args, None, None, model=model, optimizer=wrapped)

    def steps(self, loss, count=1, rate=None):
        for _ in range(count):
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] if rate is None else rate
            if loss is not None:
                loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.callback.on_step_end(self.args, SimpleNamespace(global_step=self.step), TrainerControl())


def policy(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model.to(dtype)


def loss_of(model):
    def loss():
        inputs = torch.randn(32, 64, dtype=next(model.parameters()).dtype)
        return (model(inputs).float() - 1).square().mean()

    return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_weights_are_warned_of(caplog, dtype):
    """AdamW moves a weight by 1e-6 a step. Neighbours of 0.02 are 1.2e-4 apart in bf16, 1.9e-9 in float32."""
    model = policy(dtype)
    Run(torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0), model).steps(loss_of(model), 3)
    said = "trainable weights are in bfloat16, to which AdamW rounds its updates"
    assert [said in record.message for record in caplog.records] == [True] * (dtype is torch.bfloat16)


def test_an_optimizer_that_rounds_stochastically_is_not_warned_of(caplog):
    """A bf16 weight moves in one of a hundred such steps, by a hundred of them: right on average."""
    model = policy(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    optimizer.bf16_stochastic_round = True  # as torchao's
    Run(optimizer, model).steps(loss_of(model))
    assert not caplog.records


def test_a_run_that_can_change_no_weight_is_refused_and_one_that_is_asked_to_change_none_is_told(caplog):
    model, other = policy(torch.float32), policy(torch.float32)
    with pytest.raises(ConfigError, match=r"the optimizer \(SGD\) holds none of the policy's trainable weights"):
        Run(torch.optim.SGD(other.parameters(), lr=0.1), model)
    for weight in model.parameters():
        weight.requires_grad = False
    with pytest.raises(ConfigError, match=r"no weight of the policy is trainable .* is_trainable=True"):
        Run(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert not caplog.records
    Run(torch.optim.SGD(other.parameters(), lr=0.0), other)
    [told] = caplog.messages
    assert told.removeprefix("[RANK 0] ") == "[Weights] the learning rate is 0: this run doesn't change any weight"


def test_a_step_that_changes_nothing_ends_the_run_unless_it_can_not_yet():
    model = nn.Embedding(10, 4)
    nn.init.ones_(model.weight)
    loss = lambda: model(torch.tensor([1, 2])).sum()  # noqa: E731  a gradient of 1
    # 1 - 1e-9 is 1 in float32: neighbours below 1 are 6e-8 apart
    refusal = pytest.raises(
        ConfigError, match=r"no trainable weight .* changed in step 1, at a learning rate of 1e-09"
    )
    with refusal:
        Run(torch.optim.SGD(model.parameters(), lr=1e-9), model).steps(loss)
    run = Run(torch.optim.SGD(model.parameters(), lr=0.1), model)
    run.steps(lambda: 1e-9 * loss())  # noise of a gradient, as of a KL of 0 beside equal rewards
    run.steps(None)  # a skipped batch: no gradients
    for rate in (0.0, 5e-10):  # warm-up
        run.steps(loss, rate=rate)
    run.steps(loss, rate=0.1)  # the first that is compared
    run.steps(loss, rate=1e-10)  # and the last


@pytest.mark.parametrize("autocast", [True, False])
def test_trained_weights_of_a_peft_model_become_float32(tiny, autocast):
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert {each.dtype for name, each in trained.items() if "lora_" in name} == {torch.float32}  # peft's own work
    for name, each in trained.items():
        if "lora_" in name:
            each.data = each.data.bfloat16()  # as TRL does with a quantised model
    raise_adapters(model, autocast)
    assert {each.dtype for name, each in trained.items() if "lora_" in name} == {torch.float32}
    # a whole module would meet bf16 activations without autocast
    whole = {each.dtype for name, each in trained.items() if "lora_" not in name}
    assert whole == {torch.float32 if autocast else torch.bfloat16}
    fixed = {each.dtype for each in model.parameters() if not each.requires_grad}
    assert fixed == {torch.bfloat16}


def test_log_probs_are_compared_where_a_token_counts_and_has_both():
    ours = torch.tensor([[-1.0, -2.0, NAN, -9.0], [-1.0, -1.0, -1.0, -1.0]])
    sampled = torch.tensor([[-1.5, -1.0, -1.0, NAN], [NAN, -1.25, -1.0, -7.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    # |0.5| + |1| + |0.25| + 0 over four tokens; NaN of ours, and of the sampler
    assert logp_difference(ours, sampled, mask).tolist() == [1.75, 4, 2]


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ([20.2, 10.0, 0.0], r"differ from the trainer's by 2\.020 nats on average over the first 10 tokens"),
        ([math.inf, 10.0, 0.0], "by inf nats"),
        ([0.01, 99.0, 1.0], "1 of the first 100 sampled tokens"),
    ],
    ids=["far", "infinite", "one NaN"],
)
def test_other_weights_and_log_probs_that_are_no_numbers_stop_a_run(sums, message):
    check = WeightCheck(limit=0.5, hints="The hint.")
    with pytest.raises(WeightSyncError, match=message + r".* The hint\.$"):
        check.record(torch.tensor(sums))


def test_the_check_is_done_with_the_first_batch_that_has_a_token(caplog):
    caplog.set_level(logging.INFO)
    check = WeightCheck(limit=0.5)
    check.record(torch.tensor([0.0, 0.0, 0.0]))
    assert not check.is_done
    check.record(torch.tensor([0.02, 10.0, 0.0]))
    assert check.is_done
    assert "log-probs differ by 0.0020 nats on average over 10 tokens" in caplog.text
