"""The passes of an update, as TRL makes them and with each prompt once: seconds, memory, exactness, longest prompt.

    .venv/bin/python -m benchmarks.passes [--shapes 0.5b 7b] [--prompt_tokens 128 1024 3072] [--json FILE]
    .venv/bin/python -m benchmarks.passes --shapes 7b --longest     # the longest prompt that fits
    .venv/bin/python -m benchmarks.passes --shapes tiny             # on a CPU

Random weights, no generation, no rewards, no optimizer: the method of TRL's trainer that gives log-probs and
entropies, and a loss with a random weight for each token. 64 completions of 66 to 256 tokens (140 on average), 8 for
each prompt. Their lengths are the middles of the eighths of the distribution that `benchmarks.lengths` draws from.

- `trl`: micro-batches of 8 completions of one prompt;
- `shared`: this package's passes for the same micro-batches, by the tokens of a pass (`alone`: one micro-batch);
- `pass`: seconds of forward and backward for all 64; `no grad`: of log-probs alone;
- `peak`: GiB above weights and gradients.

`exact` compares log-probs and gradient in bfloat16 with those of TRL's way in float32, for one group.
"""

import contextlib
import gc
import math
import statistics
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import PartialState
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from benchmarks.common import SHAPES, allocated, device, device_name, dtype, now, parser, peak, write_json
from salesrl_trl.rollout.model_passes import Passes
from salesrl_trl.shared_prompts.shared_passes import LogProbs, PassSettings, SharedPrompts

GROUP, GROUPS, MOST = 8, 8, 256
PER_PASS = (None, 4096, 8192, 16384)
"""Tokens of a pass; `None` for one micro-batch."""
LOSS_WEIGHT = 0.1
WAYS = ("trl", "shared")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    on_gpu = torch.cuda.is_available()
    made.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["0.5b", "7b"] if on_gpu else ["tiny"])
    made.add_argument("--prompt_tokens", nargs="+", type=int, default=[128, 1024, 3072] if on_gpu else [16, 64])
    made.add_argument("--checkpointing", nargs="+", choices=("on", "off"), default=["on", "off"])
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--groups", type=int, default=GROUPS, help="prompts of an update, 8 completions each")
    made.add_argument("--most", type=int, default=MOST if on_gpu else 16, help="longest completion")
    made.add_argument("--longest", action="store_true", help="only the longest prompt that fits")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="with --longest")
    made.add_argument("--exact", action="store_true", help="also compare bfloat16 with float32")
    args = made.parse_args(argv)
    PartialState()  # of the loggers
    figures: list[dict[str, Any]] = []
    for shape in args.shapes:
        for checkpointing in args.checkpointing:
            bench = Bench(shape, args.most, checkpointing=checkpointing == "on")
            if args.longest:
                figures += bench.longest(args.ways)
            else:
                figures += bench.measure(args.prompt_tokens, args.groups, args.rounds)
            if args.exact and not args.longest and checkpointing == "on":
                figures += [bench.exact(tokens) for tokens in args.prompt_tokens]
            del bench
            gc.collect()
            write_json(args.json, {"device": device_name(device()), "rows": figures})


class Bench:
    """One model, and both ways through it.

    Args:
        shape (`str`):
            One of `SHAPES`.
        most (`int`):
            Tokens of the longest completion. The shortest has a quarter of it.
        checkpointing (`bool`):
            Gradient checkpointing.
    """

    def __init__(self, shape: str, most: int, *, checkpointing: bool) -> None:
        set_seed(0)
        self._shape, self._most, self._checkpointing, self._device = shape, most, checkpointing, device()
        with self._device:
            self._model = Qwen2ForCausalLM._from_config(
                Qwen2Config(**SHAPES[shape], max_position_embeddings=2**17), dtype=dtype(self._device)
            ).train()
        if checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        add_fused_lm_head(self._model, outputs=("log_probs", "entropy"))
        method = GRPOTrainer._get_per_token_logps_and_entropies
        trainer = types.SimpleNamespace(
            accelerator=types.SimpleNamespace(autocast=contextlib.nullcontext),
            args=types.SimpleNamespace(report_to=[]),
        )
        self._trl: Callable[..., LogProbs] = lambda *given, **named: method.__wrapped__(trainer, *given, **named)
        self._prompts = SharedPrompts(
            self._model, PassSettings(is_on=True, autocast=contextlib.nullcontext, highest=int)
        )

    def batches(self, prompt: int, groups: int) -> list[dict[str, torch.Tensor]]:
        """Micro-batches as TRL pads them: one group each, completions of the lengths of `benchmarks.lengths`."""
        torch.manual_seed(0)
        vocabulary = SHAPES[self._shape]["vocab_size"]
        made = []
        for _ in range(groups):
            draws = [-math.log1p(-(place + 0.5) / GROUP) * self._most / 3 for place in range(GROUP)]
            lengths = [min(self._most // 4 + int(each), self._most) for each in draws]
            mask = torch.arange(self._most) < torch.tensor(lengths)[:, None]
            ids = torch.randint(5, vocabulary, (1, prompt)).expand(GROUP, -1)
            completion = torch.randint(5, vocabulary, (GROUP, self._most)).where(mask, 0)
            weights = torch.randn(GROUP, self._most).where(mask, 0) * LOSS_WEIGHT
            given = {
                "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": completion,
                "completion_mask": mask.long(), "weights": weights,
            }  # fmt: skip
            made.append({name: each.to(self._device) for name, each in given.items()})
        return made

    def _arguments(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
        ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), dim=1)
        return ids, torch.cat((batch["prompt_mask"], batch["completion_mask"]), dim=1), self._most

    def train(self, batches: Sequence[dict[str, torch.Tensor]], per_pass: int | None, *, trl: bool = False) -> None:
        """Forward and backward for all micro-batches."""
        ahead = Passes(self._prompts, per_pass or 1, 1)
        for place, batch in enumerate(batches):
            ahead.begin(batches[place:], len(batches), is_last=place + 1 == len(batches))
            given = {"compute_entropy": True, "compute_aux_loss": False}
            args = (self._model, *self._arguments(batch))
            logps = self._trl(*args, **given)[0] if trl else ahead.log_probs({}, self._trl, *args, **given)[0]
            assert self._prompts.is_on
            (logps * batch["weights"]).sum().backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def score(self, batches: Sequence[dict[str, torch.Tensor]], *, trl: bool = False) -> None:
        """Log-probs of all completions."""
        ids, mask, width = (
            torch.cat(each) if isinstance(each[0], torch.Tensor) else each[0]
            for each in zip(*map(self._arguments, batches), strict=True)
        )
        if trl:
            self._trl(self._model, ids, mask, width, batch_size=GROUP)
        else:
            self._prompts.log_probs(self._trl, self._model, ids, mask, width, batch_size=GROUP)

    def timed(self, work: Callable[[], None], rounds: int) -> dict[str, float] | None:
        """Seconds, and the peak in GiB above what was there before; `None` if the memory is too small. The first time
        does not count."""
        try:
            work()
            seconds = []
            gc.collect()
            before = allocated()
            for _ in range(rounds):
                started = now()
                work()
                seconds.append(now() - started)
            return {"seconds": statistics.median(seconds or [math.nan]), "peak_gib": (peak() - before) / 2**30}
        except torch.OutOfMemoryError:
            self._model.zero_grad(set_to_none=False)
            gc.collect()
            torch.cuda.empty_cache()
            return None

    def measure(self, prompts: Sequence[int], groups: int, rounds: int) -> Iterator[dict[str, Any]]:
        """The figures of each length of prompts."""
        for tokens in prompts:
            batches = self.batches(tokens, groups)
            lengths = [each["completion_mask"].sum().item() / GROUP for each in batches]
            print(
                f"{self._shape}, prompts of {tokens}, completions of {statistics.mean(lengths):.0f}, checkpointing "
                f"{self._checkpointing}",
                flush=True,
            )
            arms: dict[str, Callable[[], None]] = {"trl": lambda b=batches: self.train(b, None, trl=True)}  # type: ignore[misc]
            arms |= {f"shared {most or 'alone'}": lambda b=batches, m=most: self.train(b, m) for most in PER_PASS}  # type: ignore[misc]
            arms |= {
                "trl no grad": lambda b=batches: self.score(b, trl=True),  # type: ignore[misc]
                "shared no grad": lambda b=batches: self.score(b),  # type: ignore[misc]
            }
            found = {name: self.timed(work, rounds) for name, work in arms.items()}
            for name, each in found.items():
                base = found["trl no grad" if name.endswith("no grad") else "trl"]
                ratio = f"{each['seconds'] / base['seconds']:.3f}" if each and base else "-"
                line = f"{each['seconds']:9.3f} s {each['peak_gib']:8.2f} GiB" if each else "does not fit"
                print(f"  {name:16} {line:>26} {ratio:>8}", flush=True)
            yield {
                "shape": self._shape, "prompt_tokens": tokens, "checkpointing": self._checkpointing, "arms": found,
            }  # fmt: skip

    def longest(self, ways: Sequence[str] = WAYS) -> Iterator[dict[str, Any]]:
        """The longest prompt of a micro-batch of 8 beside gradients, AdamW's two moments and a reference, all in the
        weights' format: by bisection of the logarithm to 6 %, up to 2**17 tokens."""
        resident = [torch.empty_like(each) for each in self._model.parameters() for _ in range(3)]
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for name in ways:
            self.train(self.batches(64, groups=1), None, trl=name == "trl")  # compares both ways at first use
            fits, fails, tokens = 64, 2**17 + 1, 2**17
            while fails > fits * 1.06 and tokens > fits:
                batches = self.batches(tokens, groups=1)
                if self.timed(lambda b=batches: self.train(b, None, trl=name == "trl"), 0):  # type: ignore[misc]  # noqa: B023
                    fits = tokens
                else:
                    fails = tokens
                tokens = round(math.sqrt(fits * fails))
            print(f"{self._shape}, checkpointing {self._checkpointing}, {name}: a prompt of {fits} tokens", flush=True)
            yield {"shape": self._shape, "checkpointing": self._checkpointing, "way": name, "longest": fits}
        del resident

    def exact(self, tokens: int) -> dict[str, Any]:
        """How far both ways in bfloat16 are from TRL's in float32: log-probs in nats, and the gradient's share."""
        [batch] = self.batches(tokens, groups=1)
        found = {}
        exact = self._model
        for name in ("float32", "trl", "shared"):
            exact.float() if name == "float32" else exact.to(dtype(self._device))
            exact.zero_grad(set_to_none=True)
            args = (exact, *self._arguments(batch))
            given = {"compute_entropy": True, "compute_aux_loss": False}
            way = self._prompts.log_probs if name == "shared" else None
            logps = (way(self._trl, *args, **given) if way else self._trl(*args, **given))[0]
            (logps * batch["weights"]).sum().backward()  # type: ignore[no-untyped-call]
            picked = [each.grad.flatten()[::997].float() for each in exact.parameters() if each.grad is not None]
            found[name] = (logps.detach().float(), torch.cat(picked))
        counted = batch["completion_mask"].bool()
        true, gradient = found["float32"]
        figures: dict[str, Any] = {"shape": self._shape, "prompt_tokens": tokens}
        for name in ("trl", "shared"):
            logps, grads = found[name]
            figures[name] = {
                "logps": (logps - true).abs()[counted].mean().item(),
                "gradient": ((grads - gradient).norm() / gradient.norm()).item(),
            }
            print(f"  exact, {name}: {figures[name]}", flush=True)
        return figures


if __name__ == "__main__":
    main()
