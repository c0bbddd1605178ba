"""Answers to held-out rows, and a subject whose answers a test writes."""

from types import SimpleNamespace

from salesrl_trl.types import Answered, Outcome, Reward

INVALID = Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason="not_json")


def answered(branch, value, text="Hello", reason="rag_8b_timeout", **given):
    """An answer with this reward; `None` for one that could not be scored, for this reason."""
    outcome = Outcome.INFRA if value is None else Outcome.OK
    reward = Reward(outcome=outcome, value=value, reason=reason if value is None else "")
    return Answered(branch=branch, text=text, **{"reward": reward, "tokens": 10, "truncated": False, **given})


class WrittenSubject:
    """A `Subject` that answers at step n with the n-th of `scripts`, and writes weights that say so."""

    def __init__(self, scripts, weights="model.safetensors"):
        self.scripts, self._weights = scripts, weights
        self.step, self.asked, self.logged, self.saved = 0, [], {}, []

    def answer(self, rows):
        self.asked.append((self.step, len(rows)))
        return self.scripts[self.step]

    def betas(self):
        return {"fairness": 0.1}

    def save(self, folder):
        self.saved.append(self.step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self._weights).write_text(f"step {self.step}")

    def log(self, figures):
        self.logged[self.step] = figures


def one_rank(**given):
    """`Ranks` of a run with one process, or what a test makes of it."""
    alone = {"count": 1, "index": 0, "gather": list, "from_main": lambda value: value, "wait": lambda: None}
    return SimpleNamespace(**{**alone, **given})
