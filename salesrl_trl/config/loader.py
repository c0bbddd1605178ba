"""The data loader: as many worker processes as suit the machine.

Owns this number, and the settings that would not go with it. transformers starts the workers.
"""

import os

from trl import GRPOConfig

AUTO_WORKERS = -1
"""A value of `dataloader_num_workers`: a quarter of the process's share of the cores."""
MOST_WORKERS = 16
"""More workers than this bring nothing: rows are short texts."""


def settle_loader(args: GRPOConfig) -> None:
    """Size the loader's workers. Without workers nothing is prefetched, and without a GPU no memory is pinned."""
    if args.dataloader_num_workers == AUTO_WORKERS:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        args.dataloader_num_workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)) // processes // 4)
        if args.dataloader_num_workers == 0:
            args.dataloader_prefetch_factor = None  # transformers refuses it
    args.dataloader_pin_memory = args.dataloader_pin_memory and not args.use_cpu
