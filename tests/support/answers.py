"""Answers to held-out rows, and a subject whose answers a test writes."""

from types import SimpleNamespace

from salesrl_trl.launch.evaluation import quick
from salesrl_trl.telemetry.timeline import Timeline
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

    def save(self, folder):
        self.saved.append(self.step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self._weights).write_text(f"step {self.step}")

    def log(self, figures):
        self.logged[self.step] = figures


def one_rank(count=1, index=0):
    """accelerate's state of a run with so many processes."""
    return SimpleNamespace(
        num_processes=count, process_index=index, is_main_process=not index, wait_for_everyone=lambda: None
    )


def quick_evaluations(patch, subject, folder, settings, ranks=None, rows=()):
    """The part, connected to a run whose policy is `subject`. `patch`: pytest's `monkeypatch`."""
    patch.setattr(quick, "PartialState", lambda: ranks or one_rank())
    patch.setattr(quick, "GreedySubject", lambda _: subject)
    patch.setattr(quick, "sample", lambda *_: rows)
    args = {"branches": ("fairness", "hallucination"), "output_dir": folder, "min_valid_reward_fraction": 0.5}
    trl = {"step": lambda: subject.step, "save": lambda path: subject.save(path), "log": subject.log}
    part = quick.QuickEvalPart()
    part.connect(
        SimpleNamespace(
            args=SimpleNamespace(**args),
            trl=SimpleNamespace(**trl, eval_dataset=None),
            kl=SimpleNamespace(control=SimpleNamespace(betas=(0.1, None))),
            instruments=SimpleNamespace(timeline=Timeline()),
            run_control=SimpleNamespace(is_spent=False),
            figures=SimpleNamespace(words={}),
            quick_eval=settings,
            branches=None,
            parts=(),
        )
    )
    return part
