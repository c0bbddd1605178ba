"""Rollouts in flight: launched early, collected late.

Owns what lies between a generation batch's prompts and the moment it is trained on: the generation, each completion's
reward from the moment vLLM has finished it, and the wait for whole groups. When a rollout may be launched is the
schedule's; what TRL does with completions and rewards stays TRL's.
"""

import asyncio
import contextlib
import copy
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.logging import get_logger
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from salesrl_trl.generation.requests import Requests
from salesrl_trl.generation.vllm import replaced
from salesrl_trl.names import Phase
from salesrl_trl.reward.batch import RewardBatch
from salesrl_trl.rollout.schedule import Schedule, Update, UpdatesAhead, parts
from salesrl_trl.timing import Span

logger = get_logger(__name__)

SHARED_BY_A_MICRO_BATCH = ("bnpo",)
"""Loss types in which a completion's weight depends on those beside it in a micro-batch."""


@dataclass(eq=False, kw_only=True, slots=True)
class Rollout:
    """Completions that were generated, from then until they have been trained on."""

    inputs: list[dict[str, Any]]
    """Rows of this rank's generation batch, B of them."""
    rewards: RewardBatch
    """Their rewards, which may still be out."""
    step: int
    """Optimizer steps that the weights had taken which sampled them."""
    requests: Requests | None = None
    """To vLLM's server, while nobody has taken what came of them."""
    generated: tuple[Any, ...] = ()
    """What TRL's `_generate` returned: eight lists, those that are not empty of length B."""
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """What TRL measured while it generated; told with the step that trains on it."""
    tokens: int = 0
    """Tokens of prompts and completions on all ranks, as TRL counts those seen."""
    behaviour_logps: torch.Tensor | None = None
    """Log-probs of the policy that sampled, shape (B, C), where the sampler gives none and they are needed."""
    logps: dict[bool, torch.Tensor] = field(default_factory=dict)
    """Old and reference log-probs, shape (B, C), by whether they are the reference's: the same in every pass."""


class Parts:
    """A generation batch that is trained on part by part, those first whose rewards are in.

    Args:
        rollout (`Rollout`):
            The generation batch.
        places (`Sequence[range]`):
            Its parts, each of whole groups and whole micro-batches.
        micro_batch (`int`):
            Completions of a micro-batch.
    """

    def __init__(self, rollout: Rollout, places: Sequence[range], micro_batch: int) -> None:
        self.rollout = rollout
        self.remaining = list(places)
        self.complete = False
        """Whether every reward was in, on every rank, when advantages were last computed."""
        self.out: list[range] = []
        """Parts of which this rank waits for one, not settled then; one may have settled since. Empty where another
        rank has more to wait for, as long as too little is scored for any to be trained on."""
        self._micro_batch = micro_batch
        self._ready: list[range] = []
        self._queue: deque[dict[str, Any]] = deque()

    def see(self, settled: torch.Tensor, rank: int, scored_fraction: float, wanted_fraction: float) -> None:
        """Learn what is in by now. Each rank has an order of its own: a part of whole groups is nobody else's.

        Args:
            settled (`torch.Tensor`):
                Shape (world size, B), bool.
            rank (`int`):
                This one.
            scored_fraction (`float`):
                Share of all completions that have a reward so far.
            wanted_fraction (`float`):
                Share below which a batch is skipped. As long as it could be, no part is ready.
        """
        self.complete = bool(settled.all())
        out_by_rank = [[part for part in self.remaining if not each[part.start : part.stop].all()] for each in settled]
        own = out_by_rank[rank]
        enough = scored_fraction >= wanted_fraction
        self._ready = [part for part in self.remaining if enough and part not in own]
        # Too little is scored: nothing is released on any rank yet, and what comes next most likely comes where most
        # is out. A rank that waited for its own last group would hold up all others, who have enough by then.
        self.out = own if enough or len(own) == max(map(len, out_by_rank)) else []

    def release(self, output: dict[str, Any]) -> None:
        """Put the micro-batches in line whose advantages `output` has right.

        Args:
            output (`dict`):
                The whole generation batch as TRL made it: tensors of shape (B, ...), and scalars.
        """
        for part in list(self.remaining) if self.complete else self._ready:
            self.remaining.remove(part)
            for first in range(part.start, part.stop, self._micro_batch):
                rows = slice(first, first + self._micro_batch)
                self._queue.append({
                    name: value[rows] if isinstance(value, torch.Tensor) and value.ndim else value
                    for name, value in output.items()
                })  # fmt: skip
        self._ready = []

    @property
    def has_next(self) -> bool:
        """Whether a micro-batch is in line."""
        return bool(self._queue)

    @property
    def is_empty(self) -> bool:
        """Whether every micro-batch was taken."""
        return not self.remaining and not self._queue

    def next(self) -> dict[str, Any]:
        """The next micro-batch in line."""
        return self._queue.popleft()


class Pipeline:
    """Launches a trainer's rollouts and waits for their rewards.

    Args:
        trainer (`SalesGRPOTrainer`):
            Whose rollouts they are.
        lookahead (`int`):
            Optimizer steps that rollouts may be ahead.
        references_ahead (`bool`):
            Ask for the reference answers of the step behind those, before it is generated.
    """

    def __init__(self, trainer: Any, lookahead: int, references_ahead: bool) -> None:
        self._trainer = trainer
        self._lookahead = lookahead
        self._references_ahead = references_ahead
        self._schedule = Schedule(lookahead, trainer.args.steps_per_generation * trainer.num_iterations)
        self._updates = UpdatesAhead(lookahead + references_ahead)
        self._dataloader: Any = ()
        of_a_server = trainer._streams and trainer.args.vllm_mode == "server"
        self._in_background = bool(lookahead) and of_a_server  # it generates while the trainer trains
        # its completions are decoded in another thread than prompts are encoded in, which may not share a tokenizer
        self._decoder = copy.deepcopy(trainer.processing_class) if of_a_server else trainer.processing_class

    @property
    def epoch(self) -> int:
        """The epoch whose prompts are pulled at the moment."""
        return self._updates.epoch

    def restart(self) -> None:
        """A run begins."""
        trainer = self._trainer
        self.forget()
        self._schedule.restart(trainer._step, trainer.state.global_step, trainer._buffered_inputs is not None)

    def forget(self) -> None:
        """Give up what is in flight and nobody will train on, a batch too that a step was interrupted in."""
        trainer = self._trainer
        self._updates.restart()
        self._dataloader = ()
        for rollout in self._schedule.restart(0, 0, False):
            if rollout.requests is not None:
                rollout.requests.give_up()
        for rewards in trainer._reward.open_batches:
            trainer.async_loop.call_soon_threadsafe(trainer._reward.forget, rewards)

    def epoch_begins(self, dataloader: Any) -> None:
        """Training goes through `dataloader` once, and then perhaps once more."""
        self._dataloader = dataloader

    def next_update(self, epoch: int, iterator: Iterator[Any], pull: Callable[[Iterator[Any]], Update]) -> Update:
        """The micro-batches of the next optimizer step; later ones are pulled too."""
        state = self._trainer.state
        left = state.max_steps - state.global_step
        return self._updates.next(
            epoch, iterator, self._next_epoch, pull, left, self._see_update, _draw_as_a_dataloader
        )

    def _next_epoch(self) -> Iterator[Any]:
        """The micro-batches of the epoch behind the one in training. Leaves torch's generator as it is: what a
        dataloader draws when it begins is drawn when the epoch does, so that nothing is sampled otherwise for it."""
        with torch.random.fork_rng(devices=[]):
            iterator = iter(self._dataloader)
            first = list(itertools.islice(iterator, 1))
        return itertools.chain(first, iterator)

    def _see_update(self, micro_batches: list[Any]) -> None:
        for window in self._schedule.add(micro_batches):
            if self._references_ahead:
                self._fetch_references(window.inputs)

    def _fetch_references(self, inputs: Sequence[dict[str, Any]]) -> None:
        trainer = self._trainer
        rows = [example["row"] for example in inputs]
        trainer.async_loop.call_soon_threadsafe(trainer._reward.fetch_references, rows)

    def launch_due(self) -> None:
        """Generate what may be generated by now, and start its rewards."""
        trainer = self._trainer
        for window in self._schedule.due(trainer._step, trainer.state.global_step):
            window.rollout = self.launch(window.inputs)

    def take(self, inputs: list[dict[str, Any]]) -> Rollout:
        """The rollout of these inputs, generated now where it was not before."""
        rollout: Rollout | None = self._schedule.take(self._trainer._step, inputs)
        if rollout is None:
            rollout = self.launch(inputs)
        if rollout.requests is not None:
            self._collect(rollout, rollout.requests)
        return rollout

    def launch(self, inputs: list[dict[str, Any]]) -> Rollout:
        """Generate completions, and start the reward of each as soon as it is there. In the background, nothing is
        generated yet when this returns.

        Args:
            inputs (`list[dict]`):
                Examples with `prompt` and `row`, B of them.
        """
        trainer = self._trainer
        rewards = trainer._reward.begin([example["row"] for example in inputs])
        rollout = Rollout(inputs=inputs, rewards=rewards, step=trainer.state.global_step)
        if self._references_ahead and not trainer.model.training:
            self._fetch_references(inputs)
        if self._in_background and trainer.model.training:
            with trainer._timeline.phase(Phase.GENERATION):
                rollout.requests = trainer._ask_server(inputs, self._teller(rewards))
            return rollout
        was_training = trainer.model.training
        self._generate(rollout, self._streamed(rewards))
        trainer.model.train(was_training)  # transformers' continuous batching leaves it in training
        if self._lookahead and trainer.model.training and not trainer.use_vllm:
            rollout.behaviour_logps = self._logps(*rollout.generated[:2])
        return rollout

    def _collect(self, rollout: Rollout, requests: Requests) -> None:
        """Wait for what the server was asked for. Weights that have moved since are pushed before the next rollout."""
        trainer = self._trainer
        with replaced(trainer, "_last_loaded_step", trainer.state.global_step):
            self._generate(rollout, trainer.vllm_generation.answered(requests))
        rollout.requests = None
        track = f"vLLM server {requests.lane + 1}"
        span = Span(name=Phase.GENERATION, started=requests.started, ended=requests.ended, track=track)
        trainer._instruments.record_generation(span)

    def _generate(self, rollout: Rollout, source: contextlib.AbstractContextManager[None]) -> None:
        trainer = self._trainer
        with trainer._timeline.phase(Phase.GENERATION), self._measured(rollout), source:
            rollout.generated = trainer._generate_now([example["prompt"] for example in rollout.inputs])
        trainer.async_loop.call_soon_threadsafe(rollout.rewards.start_all, rollout.generated[3])

    def wait(self, rewards: RewardBatch, groups: Sequence[Sequence[int]]) -> None:
        """Wait until the rewards of one of the groups are in. Interrupted, it gives the batch up."""
        waiting = asyncio.run_coroutine_threadsafe(rewards.settled(groups), self._trainer.async_loop)
        try:
            waiting.result()
        except BaseException:
            waiting.cancel()
            raise

    @contextlib.contextmanager
    def _measured(self, rollout: Rollout) -> Iterator[None]:
        """What TRL measures of the generation goes to the rollout, to be told when it is trained on."""
        trainer = self._trainer
        mode = "train" if trainer.model.training else "eval"
        metrics, tokens = trainer._metrics[mode], trainer.state.num_input_tokens_seen
        trainer._metrics[mode] = rollout.metrics
        try:
            yield
        finally:
            trainer._metrics[mode] = metrics
            rollout.tokens = trainer.state.num_input_tokens_seen - tokens
            trainer.state.num_input_tokens_seen = tokens
            rollout.metrics.pop("num_tokens", None)

    @contextlib.contextmanager
    def _streamed(self, rewards: RewardBatch) -> Iterator[None]:
        """Where vLLM tells of single completions, the reward of each starts when it is finished; else after
        generation."""
        trainer = self._trainer
        if not trainer._streams:
            yield
            return
        with trainer.vllm_generation.streamed(self._teller(rewards), len(rewards)):
            yield

    def _teller(self, rewards: RewardBatch) -> Callable[[int, Sequence[int]], None]:
        def finished(place: int, token_ids: Sequence[int]) -> None:
            text = self._decoder.decode(token_ids, skip_special_tokens=True)
            self._trainer.async_loop.call_soon_threadsafe(rewards.start, place, text)

        return finished

    def _logps(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> torch.Tensor:
        """Log-probs of completions under the policy as it is, shape (B, C), padded as TRL pads them."""
        trainer = self._trainer
        token, multiple = trainer._tokenizer.pad_token_id, trainer.pad_to_multiple_of
        columns, masks = [], []
        for sequences, side in ((prompt_ids, "left"), (completion_ids, "right")):
            tensors = [torch.tensor(ids) for ids in sequences]
            ones = [torch.ones_like(ids) for ids in tensors]
            columns.append(pad(tensors, padding_value=token, padding_side=side, pad_to_multiple_of=multiple))
            masks.append(pad(ones, padding_value=0, padding_side=side, pad_to_multiple_of=multiple))
        device = trainer.accelerator.device
        ids, mask = torch.cat(columns, dim=1).to(device), torch.cat(masks, dim=1).to(device)  # each (B, P + C)
        checkpointing = trainer.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, checkpointing):
            logps: torch.Tensor = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, columns[1].size(1), batch_size=trainer.args.per_device_train_batch_size
            )[0]
        return logps


def why_not_streamed(trainer: Any) -> str | None:
    """What keeps completions from being known one by one, with their texts as TRL will have them; `None` if nothing
    does."""
    parsed = any(
        getattr(trainer._tokenizer, name, None) is not None for name in ("response_template", "response_schema")
    )
    return _first_of({
        "transformers generates, a whole batch at once: they start when it is done": not trainer.use_vllm,
        "`rollout_func` generates a whole batch: they start when it is done": trainer.rollout_func is not None,
        "the tokenizer's response template parses completions: they start when all of a batch are generated": parsed,
    })  # fmt: skip


def why_not_divisible(trainer: Any) -> str | None:
    """What makes an update depend on which of its completions share a micro-batch, or on their order; `None` if
    nothing does."""
    args = trainer.args
    size = args.per_device_train_batch_size
    places = parts(size * args.steps_per_generation, size, trainer.num_generations)
    return _first_of({
        "`num_iterations` is above 1, so that a batch is trained on again": trainer.num_iterations > 1,
        "an update has a part of a generation batch (`steps_per_generation`)":
            args.gradient_accumulation_steps % args.steps_per_generation != 0,
        "a micro-batch and a group share no border before the batch's end, so that it has one part": len(places) <= 1,
        f"`loss_type` {trainer.loss_type} weighs a completion by its micro-batch":
            trainer.loss_type in SHARED_BY_A_MICRO_BATCH,
        "`scale_rewards: batch` divides by the spread of all rewards": trainer.scale_rewards == "batch",
        "`hybrid_reference_weight` is scaled by the spread of all rewards; not with `scale_rewards: none`":
            bool(args.hybrid_reference_weight) and trainer.scale_rewards != "none",
        f"`multi_objective_aggregation` is {trainer.multi_objective_aggregation}, which needs all rewards":
            trainer.multi_objective_aggregation != "sum_then_normalize",
        "`top_entropy_quantile` compares the tokens of a micro-batch": trainer.top_entropy_quantile != 1.0,
        "the entropy bonus is taken over a micro-batch": trainer._entropy_bonus_enabled,
        "the router's auxiliary loss is taken over a micro-batch": trainer.aux_loss_enabled,
    })  # fmt: skip


def _first_of(hindrances: dict[str, bool]) -> str | None:
    return next((hindrance for hindrance, is_there in hindrances.items() if is_there), None)


def _draw_as_a_dataloader() -> None:
    """The draw from torch's generator with which `DataLoader` seeds its workers, whether it has any or not."""
    torch.empty((), dtype=torch.int64).random_()


def correction_sums(
    ratio: torch.Tensor, mask: torch.Tensor, mode: str, low: float | None, high: float | None
) -> torch.Tensor:
    """What TRL's correction for the sampler's distribution has left out or bounded.

    Args:
        ratio (`torch.Tensor`):
            Importance ratios as the loss has them: (B, T), or (B, 1) for those of whole completions.
        mask (`torch.Tensor`):
            Completion mask, shape (B, T).
        mode (`str`):
            `vllm_importance_sampling_mode`.
        low (`float`, *optional*), high (`float`, *optional*):
            `vllm_importance_sampling_clip_min` and `_max`.

    Returns:
        `torch.Tensor` of shape (3,), float64: tokens or completions left out, those bounded, and how many there are.
    """
    counts = mask.any(dim=1, keepdim=True) if ratio.size(1) == 1 else mask.bool()
    left_out = (ratio == 0) if mode.endswith("_mask") else torch.zeros_like(counts)
    bounded = torch.zeros_like(counts)
    if mode.endswith("_truncate"):
        for bound, beyond in ((low, torch.le), (high, torch.ge)):
            if bound is not None:
                bounded = bounded | beyond(ratio, bound)
    return torch.stack([(each & counts).sum() for each in (left_out, bounded, counts)]).to(torch.float64)
