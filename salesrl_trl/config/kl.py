"""From the KL settings of a recipe to targets and a law. Owns the messages about wrong settings, and no KL itself.

Called by `training`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

from salesrl_trl.config.checks import check, load_object, structure
from salesrl_trl.config.ranges import KL_COEFFICIENT, check_range
from salesrl_trl.data.branches import ALL
from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.law import AdaptiveLaw, KLLaw, KLTarget, check_law

FIXED = "fixed"
"""A value of `kl_law`: the coefficients stay."""
COOLDOWN = "cooldown_steps"
"""An entry of `kl_law_settings` that is no argument of the law: it holds for every law."""


def targets_of(branches: Sequence[str], branch_kl: object, beta: float) -> dict[str, KLTarget]:
    """Coefficient and band of every branch, in the order of `branches`; empty if all coefficients are 0.
    Raises `ConfigError` for targets that can't work."""
    by_branch = {} if branch_kl is None else structure("branch_kl", branch_kl, dict)
    are_known = bool(branches)
    branches = branches or list(by_branch) or [ALL]  # without rows the branches are not known yet
    unknown = sorted(set(by_branch) - set(branches))
    check(
        not unknown,
        f"`branch_kl` names {', '.join(unknown)}. Expected some of: {', '.join(branches)}. Name your branches in it, "
        "or give `--branch_kl {} --beta 0.05` for one coefficient.",
    )
    check(
        not beta or not are_known or set(by_branch) != set(branches),
        f"`beta` is {beta} and `branch_kl` names every branch, so that `beta` has no effect. Expected one of them: "
        "leave out `beta`, or give `--branch_kl {}` for one coefficient.",
    )
    known = {field.name for field in dataclasses.fields(KLTarget)}
    targets = dict[str, KLTarget]()
    for branch in branches:
        entry = by_branch.get(branch, {"beta": beta})
        check(
            isinstance(entry, dict) and "beta" in entry and set(entry) <= known,
            f"`branch_kl` of {branch!r} is {entry!r}. Expected `beta`, and perhaps {', '.join(sorted(known))}.",
        )
        try:
            targets[branch] = KLTarget(**entry)
            check_range("beta", targets[branch].beta, KL_COEFFICIENT)
        except ConfigError as error:
            raise ConfigError(f"`branch_kl` of {branch!r}: {error}") from error
    return targets if any(target.beta for target in targets.values()) else {}


def _law_settings(settings: dict[str, object] | str | None) -> dict[str, object]:
    return {} if settings is None else dict(structure("kl_law_settings", settings, dict))


def cooldown_of(settings: dict[str, object] | str | None) -> int:
    """Optimizer steps after a change that no window includes. `WindowSettings` checks the value."""
    return cast(int, _law_settings(settings).get(COOLDOWN, 0))


def law_of(path: str | None, settings: dict[str, object] | str | None, law_object: KLLaw | None) -> KLLaw | None:
    """The law that moves the coefficients; `None` if they stay. `path` and `settings` are `kl_law` and
    `kl_law_settings`; `law_object` is used in place of both. Raises `ConfigError` for a law that can't work, and for
    settings that the law does not have."""
    arguments = _law_settings(settings)
    arguments.pop(COOLDOWN, None)
    if path == FIXED or law_object is not None:
        what = "a KL law is given as an object" if law_object is not None else f"`kl_law` is `{FIXED}`"
        check(
            (law_object is None or path is None) and not arguments,
            f"{what}, and by `kl_law` or `kl_law_settings` too. Expected one.",
        )
        law = law_object
    else:
        make: Callable[..., KLLaw] = AdaptiveLaw
        if path is not None:
            make = cast(Callable[..., KLLaw], load_object(path, "kl_law"))
        try:
            law = make(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"`kl_law: {path}` can't be made with `kl_law_settings: {arguments}`: {error}. Expected a class, and "
                "its keyword arguments."
            ) from error
    if law is not None:
        check_law(law)
    return law
