"""Our trainer and TRL's around equal models, and micro-batches for both, which test_kl_exactness.py compares."""

import ast
import contextlib
import inspect
import textwrap
from dataclasses import dataclass

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.launch.data.sources import build_dataset
from support.keyed import make_tiny_policy
from support.loopback import build_reward
from support.scripted import ScriptedTrainer, ScriptedUpstream, default_rows, settings

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
STEPS_PER_GENERATION = {1: 2, 4: 4}
"""By accumulation. With 1, TRL's `num_items_in_batch` spans two optimizer steps, and has to be scaled to one."""


def loss_types():
    """Everything that TRL compares `self.loss_type` with."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))))
    compared = [
        node for node in ast.walk(tree) if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type"
    ]
    constants = [each for node in compared for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return sorted({constant.value for constant in constants})


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
