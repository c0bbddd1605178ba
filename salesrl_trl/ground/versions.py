"""Installed package versions and the ranges they are tested in. Imports none of the packages."""

import importlib.metadata
import re
from dataclasses import dataclass

from packaging.requirements import Requirement

from salesrl_trl.ground.own_code import PACKAGE
from salesrl_trl.ground.process import installed, is_in


@dataclass(frozen=True)
class Package:
    name: str
    wanted: str  # range of versions: ">=1.16.0,<1.17"
    installed: str | None
    extra: str  # the extra that requires it; empty for a package that every run needs

    @property
    def is_met(self) -> bool:
        """Whether a matching version is installed; a package of an extra may be absent."""
        if self.installed is None:
            return bool(self.extra)
        return is_in(self.installed, self.wanted)

    @property
    def finding(self) -> str:
        """A sentence about a version that isn't met."""
        return f"{self.name} is {self.installed or 'not installed'}, and {self.name}{self.wanted} is required."


def packages() -> list[Package]:
    """The packages required by this package's metadata, except tools for tests and plots."""
    try:
        texts = importlib.metadata.requires(PACKAGE.name) or []
    except importlib.metadata.PackageNotFoundError:  # it is only on PYTHONPATH
        texts = []
    named = dict[str, Package]()
    for text in texts:
        requirement, extra_of = Requirement(text), re.search(r"extra == ['\"]([\w-]+)", text)
        extra, name = extra_of[1] if extra_of else "", requirement.name
        if extra not in ("test", "plots") and name not in named:  # two extras may require the same package
            named[name] = Package(name, str(requirement.specifier), installed(name), extra)
    return [*named.values()]
