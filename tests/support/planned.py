"""The rows of settings, by the plan of a run that has no other settings."""

from types import SimpleNamespace

from salesrl_trl.launch.plan import Plan


def planned(data, reward):
    """A plan that evaluates, for its records and rows."""
    training = SimpleNamespace(branches=(), held_out_eval=True)
    return Plan(SimpleNamespace(data=data, reward=reward, training=training))
