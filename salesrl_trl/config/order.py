"""Whether the completions of a generation batch may come in another order than TRL's. Owns the reasons."""

from salesrl_trl.config.training import SalesGRPOConfig

SHARED_BY_A_MICRO_BATCH = ("bnpo",)
"""Loss types in which a completion's weight depends on the other completions of its micro-batch."""


def why_in_trls_order(args: SalesGRPOConfig, entropy_bonus: bool, aux_loss: bool) -> str | None:
    """The first reason why an update depends on the order of its completions, or on their micro-batches.

    Args:
        args (`SalesGRPOConfig`):
            Settings.
        entropy_bonus (`bool`):
            Whether the loss has one.
        aux_loss (`bool`):
            Whether the loss has the auxiliary loss of a mixture's router.

    Returns:
        `str`, *optional*: the reason; `None` if there is none.
    """
    reasons = {
        "`num_iterations` is above 1, so that a batch is trained on again": args.num_iterations > 1,
        "an update has a part of a generation batch (`steps_per_generation`)":
            args.gradient_accumulation_steps % args.steps_per_generation != 0,
        f"`loss_type` {args.loss_type} weighs a completion by its micro-batch":
            args.loss_type in SHARED_BY_A_MICRO_BATCH,
        "`top_entropy_quantile` compares the tokens of a micro-batch": args.top_entropy_quantile != 1.0,
        "the entropy bonus is taken over a micro-batch": entropy_bonus,
        "the router's auxiliary loss is taken over a micro-batch": aux_loss,
    }  # fmt: skip
    return next((reason for reason, is_there in reasons.items() if is_there), None)
