"""A YAML file of settings, within limits.

Owns what is too large. A few lines whose aliases name each other can stand for more values than any memory holds, and
the constructor of PyYAML multiplies them where one mapping is merged into another. So they are counted before. Called
by `settings` and `run.run_record`.
"""

import itertools
from pathlib import Path

import yaml

from salesrl_trl.data.files import read_small

MOST_CHARACTERS = 4_000_000
"""Of a file's keys and values, with every alias written out. The longest recipe of this package has a thousandth."""


class TooLarge(yaml.YAMLError):
    """Aliases stand for too much."""


def read_yaml(path: Path) -> object:
    """The content of a YAML file, built by the safe constructor.

    Raises:
        `OSError`, `UnicodeDecodeError`: as `read_small`.
        `yaml.YAMLError`: it is no YAML, or its aliases stand for too much.
        `RecursionError`: it is nested too deeply, or holds itself.
    """
    loader = yaml.SafeLoader(read_small(path))
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _characters(node, {}) > MOST_CHARACTERS:
            raise TooLarge(f"with its aliases written out it has more than {MOST_CHARACTERS} characters")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _characters(node: yaml.Node, known: dict[int, int]) -> int:
    """Characters of a node, an alias as often as it stands there. Each node is looked at once."""
    if id(node) not in known:
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value)
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_characters(part, known) for part in parts)
    return known[id(node)]
