"""Numbers of TRL's settings, and sizes that have to go together: groups, micro-batches, generation batches, processes.

Owns these checks. TRL makes some of them too, but later, and without advice.
"""

import os

from trl import GRPOConfig

from salesrl_trl.config.checks import check
from salesrl_trl.config.ranges import EVERY, TRAINING, check_ranges

RUN_MODES = ("train", "rollouts", "rewards")
_WITHOUT_UPDATES = "Without updates: `mode: rollouts` generates and scores; `mode: rewards` scores made-up texts."

_EVERY = ("logging", "save", "eval")
"""What happens every so many steps, if its strategy is `steps`."""


def check_numbers(args: GRPOConfig) -> None:
    """Raise `ConfigError` unless numbers that neither transformers nor TRL checks lie in their ranges."""
    every = (f"{name}_steps" for name in _EVERY if getattr(args, f"{name}_strategy") == "steps")
    epochs = args.num_train_epochs
    check(epochs != 0, f"`num_train_epochs` is {epochs!r}. Expected a number, more than 0. {_WITHOUT_UPDATES}")
    check_ranges(args, TRAINING | dict.fromkeys(every, EVERY))
    steps = args.max_steps
    check(
        isinstance(steps, int) and (steps == -1 or steps > 0),
        f"`max_steps` is {steps!r}. Expected at least 1, or -1 for as many as `num_train_epochs` says. "
        f"{_WITHOUT_UPDATES}",
    )


def check_sizes(args: GRPOConfig) -> None:
    """Raise `ConfigError` unless groups, batches and processes go together."""
    check(
        args.num_generations >= 2,
        f"`num_generations` is {args.num_generations}. Expected at least 2: GRPO compares a prompt's completions.",
    )
    check(
        not args.auto_find_batch_size,
        "`auto_find_batch_size` is true, which would take groups apart. Expected false. Set a lower "
        "`per_device_train_batch_size` and more `gradient_accumulation_steps` instead.",
    )
    check(
        args.generation_batch_size is None or args.steps_per_generation is None,
        "`generation_batch_size` and `steps_per_generation` are both given. Expected one of them: leave one out.",
    )
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # transformers' own number is set later
    steps = args.steps_per_generation or args.gradient_accumulation_steps
    split = args.vllm_tensor_parallel_size
    check(
        not args.use_vllm or args.vllm_mode == "server" or processes % split == 0,
        f"`vllm_tensor_parallel_size` is {split}, and there are {processes} processes. Expected a divisor: each "
        "engine takes the GPUs of so many processes. Launch more, or set it to 1.",
    )
    micro_batch = args.per_device_train_batch_size * processes
    made = f"{args.per_device_train_batch_size} per device x {processes} processes"
    if args.generation_batch_size is None:
        batch, made = micro_batch * steps, f"{made} x {steps} steps"
    else:
        batch = args.generation_batch_size
        check(
            batch % micro_batch == 0,
            f"`generation_batch_size` is {batch}, no multiple of a micro-batch of {micro_batch} ({made}). "
            f"Expected whole micro-batches: {max(batch // micro_batch, 1) * micro_batch}, for example.",
        )
    check(
        batch % args.num_generations == 0,
        f"a generation batch holds {batch} completions ({made}), which `num_generations` {args.num_generations} "
        "does not divide. Expected whole groups. Change `per_device_train_batch_size`, "
        "`gradient_accumulation_steps` or `num_generations`.",
    )
    if args.eval_strategy != "no":
        check_evaluation(args, processes)


def check_evaluation(args: GRPOConfig, processes: int) -> None:
    """Raise `ConfigError` unless an evaluation's batch holds whole groups."""
    batch, group = args.per_device_eval_batch_size * processes, args.num_generations_eval or args.num_generations
    check(
        batch % group == 0,
        f"an evaluation's batch holds {batch} completions ({args.per_device_eval_batch_size} per device x "
        f"{processes} processes), which `num_generations_eval` {group} does not divide. Expected whole groups. "
        "Change `per_device_eval_batch_size` or `num_generations_eval`.",
    )


def check_mode(mode: str) -> None:
    """Refuse several processes for rewards."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check(
        mode != "rewards" or processes == 1,
        f"`mode: rewards` was launched with {processes} processes, and needs no GPU. Expected one: launch with "
        "`python recipes/RECIPE.py --mode rewards`.",
    )
