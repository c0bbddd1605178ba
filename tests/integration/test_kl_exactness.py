"""The branches' KL in TRL's loss: with equal coefficients stock TRL's loss and gradient, with others those of a loop.

The policies are a Qwen2 of two layers with random weights in float32, moved away from the reference. Most tests set
the same two trainers up anew for each case, and `test_the_settings_of_the_matrix_reach_trls_loss` shows that TRL reads
what they set. The test at the end builds both trainers from their configs.
"""

import contextlib
import inspect
import itertools
import math
import re
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig
from support.keyed import make_tiny_policy
from support.loopback import ACTION, build_reward
from support.pairwise import pairwise
from support.scripted import Gradients, ScriptedTrainer, ScriptedUpstream, default_rows, settings
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.kl.law import KLTarget
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.rollout.normaliser import UNITS

pytestmark = pytest.mark.usefixtures("one_thread")

BETA = 0.5
BETAS = (0.25, 1.5)
"""Different coefficients, by branch id."""
BRANCHES = ("fairness", "hallucination")
TOLERANCE = 1e-6
"""Largest relative difference of loss and gradient in float32."""
SAMPLES, PROMPT, COMPLETION = 4, 3, 8
"""Of a micro-batch: completions, and tokens of their prompts and of themselves."""
VOCAB_SIZE = 256
"""Of the matrix, in which no text is written or read."""
LOSS_TYPES = sorted(UNITS)
STEPS_PER_GENERATION = {1: 2, 4: 4}
"""By accumulation. With 1, TRL's `num_items_in_batch` spans two optimizer steps, and has to be scaled to one."""


def normaliser(case, lengths, sample, num_items):
    """What TRL divides a token's loss by. `lengths` are the micro-batch's counted tokens by sample."""
    match case.loss_type:
        case "grpo" | "sapo":  # mean over tokens, then over samples, then over micro-batches
            return lengths[sample] * len(lengths) * case.accumulation
        case "bnpo":  # mean over the micro-batch's tokens
            return sum(lengths) * case.accumulation
        case "dr_grpo":  # as if every completion were as long as can be
            return len(lengths) * case.max_completion_length * case.accumulation
        case "dapo" | "cispo" | "vespo":  # all tokens of the generation batch, of which this is one step
            return num_items * case.accumulation / STEPS_PER_GENERATION[case.accumulation]
        case "luspo":  # sum over tokens, mean over samples
            return len(lengths) * case.accumulation
    raise AssertionError(f"{case.loss_type} is not known here")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the matrix. By default as `build` configures the trainers."""

    loss_type: str = "grpo"
    accumulation: int = 1
    correction: bool = True
    level: str = "token"
    estimator: str = "k3"
    clamp: float = 0.0
    max_completion_length: int = 64
    vllm: bool = False
    entropy_quantile: float = 1.0
    off_policy_threshold: float | None = None
    delta: float | None = None
    entropy_coef: float = 0.0


def set_up(trainer, case):
    """Put a case's settings where the trainers read them."""
    trainer.loss_type = trainer.args.loss_type = case.loss_type
    trainer.importance_sampling_level = trainer.args.importance_sampling_level = case.level
    trainer.args.use_bias_correction_kl = case.correction
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps = case.accumulation
    trainer.args.steps_per_generation = STEPS_PER_GENERATION[case.accumulation]
    trainer.max_completion_length = case.max_completion_length
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = case.vllm
    trainer.top_entropy_quantile = case.entropy_quantile
    trainer.off_policy_mask_threshold = case.off_policy_threshold
    trainer.args.delta = case.delta
    trainer.entropy_coef, trainer._entropy_bonus_enabled = case.entropy_coef, case.entropy_coef != 0
    trainer.beta = BETA
    if isinstance(trainer, ScriptedTrainer):
        trainer.beta = 1.0  # what it has TRL load the reference by
        trainer.args.branch_kl["settings"] = {"estimator": case.estimator, "clamp": case.clamp}
        trainer.components.kl.settings = trainer.args.kl_penalty()
        coefficients(trainer, (BETA, BETA))


def coefficients(trainer, betas):
    for branch, beta in zip(trainer.components.kl.control.branches, betas, strict=True):
        branch.asked = beta


def make_random_policy(path, **shape):
    """Two layers, so that a gradient goes through one."""
    return make_tiny_policy(path, hidden_size=64, intermediate_size=96, num_hidden_layers=2, **shape)


def build(kind, path, reward, output_dir, lora=False, **given):
    """Our trainer or TRL's, with `BETA` for every branch and ours without clamp and control."""
    if kind is ScriptedTrainer:
        entries = {branch: {"beta": BETA} for branch in BRANCHES}
        given = {"beta": 0.0, "branch_kl": entries, "kl_log_ratio_clamp": 0.0, "held_out_eval": False, **given}
    config = SalesGRPOConfig if kind is ScriptedTrainer else GRPOConfig
    torch.manual_seed(0)  # one factor of an adapter starts at random
    trainer = kind(
        AutoModelForCausalLM.from_pretrained(path),
        reward,
        config(**settings(output_dir, **{"beta": BETA, **given})),
        train_dataset=build_dataset(default_rows(), "compact"),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
    )
    trainer.model.train()
    return trainer


class Pair:
    """Our trainer and TRL's around equal models, and a generation batch of micro-batches for them."""

    def __init__(self, path, output_dir, lora, **given):
        rows = default_rows()
        # nothing is generated, so no service is asked
        ours = {**given, "shared_prompts": 1000}  # all micro-batches of an update in one pass
        self.ours = build(ScriptedTrainer, path, build_reward("http://127.0.0.1:9", rows), output_dir, lora, **ours)
        self.stock = build(ScriptedUpstream, path, lambda **_: [0.0], output_dir, lora, **given)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in parameters(self.stock):
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
        self.ours.model.load_state_dict(self.stock.model.state_dict())
        self._prompts = None
        self.batches = [self._micro_batch(generator, lora) for _ in range(4)]

    def _micro_batch(self, generator, lora):
        def tokens(length):
            return torch.randint(3, VOCAB_SIZE, (SAMPLES, length), generator=generator)

        def mask(lengths, size):
            return (torch.arange(size) < torch.tensor(lengths)[:, None]).long()

        def noise(scale, *shape):
            return scale * torch.randn(shape, generator=generator)

        lengths = torch.randint(1, COMPLETION + 1, (SAMPLES,), generator=generator).tolist()
        batch = {
            "prompt_ids": self._shared(tokens(PROMPT)),
            "prompt_mask": mask([3, 2, 1, 3], PROMPT).flip(1),
            "completion_ids": tokens(COMPLETION),
            "completion_mask": mask(lengths, COMPLETION),
            "advantages": noise(1, SAMPLES).abs() * torch.tensor([1, -1, 1, -1]),
            "branch_ids": torch.tensor([0, 1, 1, 0]),
        }
        reference = self.stock.model if lora else self.stock.ref_model
        with torch.no_grad():
            with self.stock.model.disable_adapter() if lora else contextlib.nullcontext():
                batch["ref_per_token_logps"] = forward(self.stock, batch, reference)
            policy = forward(self.stock, batch)
        batch["old_per_token_logps"] = policy + noise(0.3, SAMPLES, COMPLETION)
        return batch

    def _shared(self, prompts):
        """All are shared by the micro-batches, and one inside of each."""
        if self._prompts is None:
            prompts[3] = prompts[0]
            self._prompts = prompts
        return self._prompts

    def inputs(self, case, *, old=True, **more):
        """Micro-batches of one optimizer step. `more` is added to each, or called with its index."""
        generation = [dict(batch) for batch in self.batches[: STEPS_PER_GENERATION[case.accumulation]]]
        for index, batch in enumerate(generation):
            if not old:
                del batch["old_per_token_logps"]
            batch.update({name: each(index) if callable(each) else each for name, each in more.items()})
        num_items = sum(counted(batch).sum() for batch in generation)
        return [{**batch, "num_items_in_batch": num_items} for batch in generation[: case.accumulation]]

    def set_up(self, case):
        set_up(self.ours, case)
        set_up(self.stock, case)


def parameters(trainer):
    return [weight for weight in trainer.model.parameters() if weight.requires_grad]


def counted(batch):
    """Which tokens count, shape (B, T)."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def forward(trainer, batch, model=None):
    """Log-probs of the completions, shape (B, T)."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    model = trainer.model if model is None else model
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].shape[1])[0]


def gradient_of(trainer):
    """Of all trained weights, one vector, in float64."""
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in parameters(trainer)]
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


def step(trainer, batches):
    """Loss and gradient of one optimizer step: sums over its micro-batches."""
    trainer._metrics["train"].clear()
    if isinstance(trainer, ScriptedTrainer):
        trainer.components.ledger.flush("train")
    trainer.model.zero_grad()
    total = 0.0
    for index, batch in enumerate(batches):
        trainer.accelerator.gradient_state._set_sync_gradients(index == len(batches) - 1)
        if isinstance(trainer, ScriptedTrainer):  # as TRL's `_prepare_inputs` would
            trainer.components.passes.begin(batches[index:], len(batches), is_last=index == len(batches) - 1)
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        total += loss.item()
    return total, gradient_of(trainer)


def gap(gradient, expected):
    return ((gradient - expected).norm() / expected.norm()).item()


@contextlib.contextmanager
def in_float64(pair):
    """While active, both policies compute in float64."""
    try:
        for trainer in (pair.ours, pair.stock):
            trainer.model.double()
        yield
    finally:
        for trainer in (pair.ours, pair.stock):
            trainer.model.float()


LOOP_TOLERANCE = 3 * TOLERANCE
"""Where the expected gradient is the sum of two, each rounded."""
LOSS_SIZE = math.log(VOCAB_SIZE)
"""Of the terms of a loss: log-probs of both signs, whose rounding stays where their sum is small."""
WEIGHTS = ("full", "lora", "full, forward again", "lora, forward again")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs that train all weights, and that train an adapter, without and with gradient checkpointing."""
    path = make_random_policy(tmp_path_factory.mktemp("small"), vocab_size=VOCAB_SIZE)
    built = {
        name: Pair(path, tmp_path_factory.mktemp("pair"), "lora" in name, gradient_checkpointing="again" in name)
        for name in WEIGHTS
    }
    yield built
    for pair in built.values():
        pair.ours.finish()


@pytest.fixture(scope="module")
def random_policy(tmp_path_factory):
    return make_random_policy(tmp_path_factory.mktemp("random"))


@pytest.fixture
def pair(pairs):
    return pairs["full"]


def assert_equal_steps(ours, expected, tolerance=TOLERANCE):
    (loss, gradient), (expected_loss, expected_gradient) = ours, expected
    assert expected_gradient.norm() > 1e-3
    assert gap(gradient, expected_gradient) <= tolerance
    assert abs(loss - expected_loss) <= tolerance * max(LOSS_SIZE, abs(expected_loss))


def assert_equal_kl(trainer, stock, batches):
    """Ours by branch, weighted by its tokens, against TRL's by micro-batch, weighted by its."""
    logged = trainer.components.ledger.flush("train")
    tokens = [logged[f"kl/{branch}_tokens"] for branch in BRANCHES]
    sums = [logged[f"kl/{branch}_penalty"] * count if count else 0.0
            for branch, count in zip(BRANCHES, tokens, strict=True)]  # fmt: skip
    theirs = [counted(batch).sum().item() for batch in batches]
    assert sum(tokens) == sum(theirs)
    expected = sum(kl * count for kl, count in zip(stock._metrics["train"]["kl"], theirs, strict=True)) / sum(theirs)
    assert expected > 1e-3
    assert sum(sums) / sum(tokens) == pytest.approx(expected, rel=TOLERANCE)
    return logged


def assert_equal_figures(ours, stock):
    """All that TRL measures in a loss."""
    wanted = stock._metrics["train"]
    assert {"entropy", "kl"} <= set(wanted) == set(ours._metrics["train"])
    for name, values in wanted.items():
        assert ours._metrics["train"][name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name


def kl_by_loops(pair, case, batches, betas):
    """Loss and gradient of the KL alone, one token after another, by TRL's documented formulas and in float64."""
    pair.stock.model.zero_grad()
    total = 0.0
    for batch in batches:
        logps = forward(pair.stock, batch).double()
        reference = batch["ref_per_token_logps"].double()
        old = batch.get("old_per_token_logps")
        old = logps.detach() if old is None else old.double()
        mask = counted(batch).tolist()
        tokens = [[t for t in range(COMPLETION) if mask[i][t]] for i in range(SAMPLES)]
        loss = 0.0 * logps.sum()
        for i in range(SAMPLES):
            mean = sum(logps[i, t] - old[i, t] for t in tokens[i]) / max(len(tokens[i]), 1)
            for t in tokens[i]:
                x = reference[i, t] - logps[i, t]
                kl = {"k1": -x, "k2": x * x / 2, "k3": x.exp() - 1 - x}[case.estimator]
                if case.correction:
                    kl = kl * torch.exp(mean if case.level == "sequence" else logps[i, t] - old[i, t])
                divisor = normaliser(case, [len(each) for each in tokens], i, batch["num_items_in_batch"].item())
                loss = loss + betas[batch["branch_ids"][i]] * kl / divisor
        loss.backward()
        total += loss.item()
    return total, gradient_of(pair.stock)


def with_kl_by_loops(pair, case, batches, betas):
    """And with TRL's own policy loss, which is its whole loss at a coefficient of 0."""
    pair.stock.beta = 0.0
    loss, gradient = step(pair.stock, batches)
    assert "kl" not in pair.stock._metrics["train"]
    kl_loss, kl_gradient = kl_by_loops(pair, case, batches, betas)
    return loss + kl_loss, gradient + kl_gradient


def some_tokens_of_tools(index):
    generator = torch.Generator().manual_seed(100 + index)
    return (torch.rand(SAMPLES, COMPLETION, generator=generator) < 0.6).long()


def sampling_ratio(*shape):
    """TRL's `importance_sampling_ratio`, some of it masked out."""

    def ratio(index):
        generator = torch.Generator().manual_seed(200 + index)
        drawn = torch.exp(0.5 * torch.randn(shape, generator=generator))
        return drawn.masked_fill(drawn > 1.8, 0.0)

    return ratio


SAMPLING = torch.full((SAMPLES, COMPLETION), -4.0)
"""Log-probs of vLLM, most of them above the policy's."""

LEVELS, SWITCH, ACCUMULATIONS = ("token", "sequence"), (True, False), (1, 4)
RATIOS = list(itertools.product(LEVELS, SWITCH, SWITCH))
"""What weights a token's KL: the level, whether it is corrected, and whether the policy has moved. They interact."""


def test_every_loss_type_of_trl_is_in_the_matrix():
    # a new one needs its line in `normaliser`
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))
    compared = re.findall(r"self\.loss_type (?:==|in) (.*):", source)
    assert {each for line in compared for each in re.findall(r'"(\w+)"', line)} == {*LOSS_TYPES}


def test_the_settings_of_the_matrix_reach_trls_loss(pair):
    def gradient(case, **inputs):
        pair.set_up(case)
        return step(pair.stock, pair.inputs(case, **inputs))[1]

    named = {
        **{loss_type: gradient(Case(loss_type=loss_type)) for loss_type in LOSS_TYPES},
        "four micro-batches": gradient(Case(accumulation=4)),
        "plain": gradient(Case(correction=False)),
        "sequence": gradient(Case(level="sequence")),
        "on-policy": gradient(Case(), old=False),
        "tool mask": gradient(Case(), tool_mask=some_tokens_of_tools),
        "vllm": gradient(Case(vllm=True), importance_sampling_ratio=sampling_ratio(SAMPLES, COMPLETION)),
        "vllm sequences": gradient(Case(vllm=True), importance_sampling_ratio=sampling_ratio(SAMPLES, 1)),
        "entropy quantile": gradient(Case(entropy_quantile=0.5)),
        "off-policy mask": gradient(Case(off_policy_threshold=-0.1)),
        "off-policy mask by vllm": gradient(Case(off_policy_threshold=-0.1), sampling_per_token_logps=SAMPLING),
        "delta": gradient(Case(delta=1.05)),
        "entropy bonus": gradient(Case(entropy_coef=0.1)),
        "length": gradient(Case(loss_type="dr_grpo", max_completion_length=32)),
    }
    pair.set_up(Case())
    pair.stock.beta = 0.0
    named["no KL"] = step(pair.stock, pair.inputs(Case()))[1]
    alike = [
        (one, other)
        for one, other in itertools.combinations(named, 2)
        if gap(named[one], named[other]) < 1000 * TOLERANCE
    ]
    assert alike == []


@pairwise(loss_type=LOSS_TYPES, ratio=RATIOS, weights=WEIGHTS, accumulation=ACCUMULATIONS)
def test_equal_coefficients_are_trls_beta(pairs, loss_type, ratio, weights, accumulation):
    """Pairs of loss type, ratio, weights and accumulation: 64 rows of 512. The loss type decides what a token's loss
    is divided by and how the ratio enters. The weights decide where log-probs come from, whatever the loss is. The
    gradient of micro-batches is a sum. So no pair depends on a third parameter."""
    pair, (level, correction, old) = pairs[weights], ratio
    case = Case(loss_type=loss_type, accumulation=accumulation, correction=correction, level=level)
    pair.set_up(case)
    batches = pair.inputs(case, old=old)
    # In float32 the rounding is up to 1.3e-6 of LoRA's gradient, and of VESPO's, whose weights are products of ratios.
    with in_float64(pair) if weights.startswith("lora") or loss_type == "vespo" else contextlib.nullcontext():
        assert_equal_steps(step(pair.ours, batches), step(pair.stock, batches))
    assert_equal_kl(pair.ours, pair.stock, batches)
    assert_equal_figures(pair.ours, pair.stock)


FEATURES = {
    "vllm, tokens": ({"vllm": True}, {"importance_sampling_ratio": sampling_ratio(SAMPLES, COMPLETION)}),
    "vllm, sequences": ({"vllm": True}, {"importance_sampling_ratio": sampling_ratio(SAMPLES, 1)}),
    "tool mask": ({}, {"tool_mask": some_tokens_of_tools}),
    "entropy quantile": ({"entropy_quantile": 0.5}, {}),
    "off-policy mask": ({"off_policy_threshold": -0.1}, {}),
    "off-policy mask by vllm": ({"off_policy_threshold": -0.1}, {"sampling_per_token_logps": SAMPLING}),
    "two-sided clipping": ({"delta": 1.05}, {}),
    "entropy bonus": ({"entropy_coef": 0.1}, {}),
    "advantages of tokens": ({}, {"advantages": torch.linspace(-1, 1, SAMPLES * COMPLETION).view(SAMPLES, -1)}),
    "default clamp": ({"clamp": 10.0}, {}),
}
"""What else shapes TRL's loss: settings, and what the micro-batch holds."""


@pairwise(loss_type=LOSS_TYPES, feature=tuple(FEATURES), level=LEVELS)
def test_equal_coefficients_are_trls_beta_beside_trls_other_terms(pair, loss_type, feature, level):
    changed, inputs = FEATURES[feature]
    case = Case(loss_type=loss_type, level=level, **changed)
    pair.set_up(case)
    batches = pair.inputs(case, **inputs)
    assert_equal_steps(step(pair.ours, batches), step(pair.stock, batches))
    assert_equal_kl(pair.ours, pair.stock, batches)


@pairwise(loss_type=LOSS_TYPES, level=LEVELS, correction=SWITCH)
def test_equal_coefficients_are_trls_beta_in_an_evaluation(pair, loss_type, level, correction):
    case = Case(loss_type=loss_type, accumulation=4, level=level, correction=correction)
    pair.set_up(case)
    batch = pair.inputs(case)[0]
    losses = []
    for trainer in (pair.ours, pair.stock):
        trainer.model.eval()
        with torch.no_grad():
            losses.append(trainer.compute_loss(trainer.model, batch).item())
        trainer.model.train()
    assert abs(losses[0] - losses[1]) <= TOLERANCE * max(LOSS_SIZE, abs(losses[1]))


ESTIMATORS = (("k3", 0.0), ("k1", 0.0), ("k1", 10.0), ("k2", 0.0), ("k2", 10.0))
"""And clamps. The default clamp with k3 is among `FEATURES`."""
INPUTS = {
    "both branches": {},
    "a branch a micro-batch": {"branch_ids": lambda index: torch.full((SAMPLES,), index % 2)},
    "tools": {"tool_mask": some_tokens_of_tools},
}


@pairwise(
    loss_type=LOSS_TYPES, kind=ESTIMATORS, accumulation=ACCUMULATIONS, correction=SWITCH, level=LEVELS, old=SWITCH,
    inputs=tuple(INPUTS),
)  # fmt: skip
def test_different_coefficients_are_a_loops(pair, loss_type, kind, accumulation, correction, level, old, inputs):
    estimator, clamp = kind
    given = {"loss_type": loss_type, "accumulation": accumulation, "estimator": estimator, "clamp": clamp}
    case = Case(**given, correction=correction, level=level)
    pair.set_up(case)
    coefficients(pair.ours, BETAS)
    batches = pair.inputs(case, old=old, **INPUTS[inputs])
    assert_equal_steps(step(pair.ours, batches), with_kl_by_loops(pair, case, batches, BETAS), LOOP_TOLERANCE)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rewards_of_a_branch_that_count_less_are_a_part_of_its_policy_loss(pair, loss_type):
    """Half of a branch's rewards is half of its policy loss, whatever the loss type; the other branch's stays."""
    case = Case(loss_type=loss_type)
    pair.set_up(case)
    batches = pair.inputs(case)
    one, other = pair.ours.components.kl.control.branches
    one.target, one.asked = KLTarget(beta=BETA, low=0.1, high=0.2, beta_max=BETA, least_share=0.25), 2 * BETA
    try:
        assert (one.beta, one.share, other.share) == (BETA, 0.5, 1.0)
        ours = step(pair.ours, batches)
    finally:
        one.target, one.asked = other.target, BETA
    pair.stock.beta = 0.0

    def of_branch(branch):
        only = [{**batch, "advantages": batch["advantages"] * (batch["branch_ids"] == branch)} for batch in batches]
        return step(pair.stock, only)

    kl, (loss, gradient), (rest, rest_gradient) = (
        kl_by_loops(pair, case, batches, (BETA, BETA)),
        *map(of_branch, (0, 1)),
    )
    expected = (kl[0] + loss / 2 + rest, kl[1] + gradient / 2 + rest_gradient)
    assert_equal_steps(ours, expected, LOOP_TOLERANCE)


@pytest.mark.parametrize("fails_in", ["forward", "loss"])
def test_beta_is_a_number_again_after_a_loss_that_failed_and_nothing_was_measured(pair, fails_in):
    pair.set_up(Case())
    pair.ours.beta = 0.125
    pair.ours.components.ledger.flush("train")
    hook = contextlib.nullcontext()
    if fails_in == "loss":
        pair.ours.loss_type = "no such"
    else:
        hook = pair.ours.model.register_forward_pre_hook(lambda *_: [][0])
    with hook, pytest.raises((ValueError, IndexError)):
        pair.ours.compute_loss(pair.ours.model, pair.inputs(Case())[0])
    assert pair.ours.beta == 0.125
    with pytest.raises(RuntimeError, match="before `add`"):
        pair.ours.components.kl.drain_sums("train")
    assert all(map(math.isnan, pair.ours.components.ledger.flush("train").values()))


def entries(**more):
    return {branch: {"beta": BETA, **more} for branch in BRANCHES}


@pytest.mark.parametrize(
    ("lora", "ours", "both"),
    [
        (False, {"branch_kl": None, "beta": BETA}, {"loss_type": "dapo", "use_bias_correction_kl": False}),
        (False, {"branch_kl": {"fairness": {"beta": BETA}}, "beta": BETA}, {"loss_type": "dr_grpo"}),
        (
            False,
            {"branch_kl": entries(low=1e-7, high=1e-6), "kl_law": "fixed", "kl_update_steps": 1},
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        ),
        (True, {"branch_kl": entries(), "kl_log_ratio_clamp": 10.0}, {"loss_type": "cispo"}),
    ],
    ids=["dapo, plain", "dr_grpo", "luspo, sequence, bands", "cispo, lora, clamp"],
)
def test_a_run_with_equal_coefficients_is_trls_run(random_policy, services, tmp_path, lora, ours, both):
    both = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,  # every other step is off-policy
        "optim": "sgd",
        "learning_rate": 5.0 if lora else 0.5,
        "lr_scheduler_type": "constant",
        **both,
    }
    reward = build_reward(services.url, default_rows(), invalid_action_reward=0.0)

    def as_judged(completions, **_):
        return [0.75 if completion[0]["content"] == ACTION else 0.0 for completion in completions]

    trainers = {
        "ours": build(ScriptedTrainer, random_policy, reward, tmp_path, lora, **both, **ours),
        "stock": build(ScriptedUpstream, random_policy, as_judged, tmp_path, lora, **both),
    }
    runs = {}
    try:
        for name, trainer in trainers.items():
            gradients = Gradients(trainer).found
            trainer.train()
            runs[name] = gradients, [logs for logs in trainer.state.log_history if "kl" in logs]
    finally:
        trainers["ours"].finish()
    (gradients, logs), (expected, expected_logs) = runs["ours"], runs["stock"]
    assert len(gradients) == len(expected) == len(logs) == len(expected_logs) == 4
    for gradient, expected_gradient, log, expected_log in zip(gradients, expected, logs, expected_logs, strict=True):
        assert gap(gradient, expected_gradient) <= 10 * TOLERANCE  # what is left of earlier steps' differences
        # TRL's is the mean of micro-batches' means, here of 2; ours a mean over tokens, as the branches' are
        assert log["kl"] == pytest.approx(expected_log["kl"], rel=0.2, abs=10 * TOLERANCE)
        tokens = [log[f"kl/{branch}_tokens"] for branch in BRANCHES]
        sums = [log[f"kl/{branch}_penalty"] * count for branch, count in zip(BRANCHES, tokens, strict=True)]
        assert log["kl"] == pytest.approx(sum(sums) / sum(tokens), abs=TOLERANCE)
        assert log["loss"] == pytest.approx(expected_log["loss"], abs=10 * TOLERANCE)
        assert [log[f"beta/{branch}"] for branch in BRANCHES] == [BETA, BETA]
    assert expected_logs[-1]["kl"] > 1e-3
