"""A dotted path in the settings gives the object that it names, or a message about the part that is wrong."""

import pytest

from salesrl_trl.config.checks import load_object
from salesrl_trl.errors import ConfigError


def test_a_dotted_path_brings_what_it_names():
    assert load_object("salesrl_trl.errors.ConfigError", "kl_law") is ConfigError


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Law", r"`kl_law` is 'Law'. Expected a dotted path"),
        ("no_such_module.Law", r"no module 'no_such_module'.*PYTHONPATH"),
        ("salesrl_trl.no_such_module.Law", r"no module 'salesrl_trl.no_such_module'"),
        ("salesrl_trl.errors.Law", r"'salesrl_trl.errors' has no 'Law'"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path, message):
    with pytest.raises(ConfigError, match=message):
        load_object(path, "kl_law")
