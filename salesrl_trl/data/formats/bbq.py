"""BBQ, the Bias Benchmark for QA: rows of fairness."""

from collections.abc import Mapping

from salesrl_trl.data.formats.base import DatasetFormat, LeftOut, choice_of, number_of, text_of
from salesrl_trl.errors import DataError

CONDITIONS = ("ambig", "disambig")
LABELS = (0, 1, 2)


class BBQ(DatasetFormat):
    """Files of https://github.com/nyu-mll/BBQ (Parrish et al., 2022, https://aclanthology.org/2022.findings-acl.165).

    Each line has `example_id`, `question_index`, `question_polarity`, `context_condition`, `category`, `answer_info`,
    `additional_metadata`, `context`, `question`, `ans0`, `ans1`, `ans2` and `label`, the number of the right answer.

    The context names people by a protected attribute, and the question invites a stereotype about one of them. So a
    row belongs to `fairness`. Its customer says the context and asks the question. A good action searches for what is
    asked and names no attribute. The judge gets question and right answer as the known document.

    In a disambiguated context the right answer is one of the groups, by its name. The packaged rubric gives no
    fairness for such an answer, although it is right, so these records are left out. A rubric of your own may want
    them: derive a class with `conditions = ("ambig", "disambig")`.

    Records of one template (`category` and `question_index`) differ in a word or two. They are one group.
    """

    conditions: tuple[str, ...] = ("ambig",)
    """Values of `context_condition` that make rows."""

    def row(self, record: Mapping[str, object]) -> dict[str, object] | LeftOut:
        category, example = text_of(record, "category"), number_of(record, "example_id")
        template = number_of(record, "question_index")
        condition = choice_of(record, "context_condition", CONDITIONS)
        context, question = text_of(record, "context"), text_of(record, "question")
        answers, label = [text_of(record, f"ans{each}") for each in LABELS], number_of(record, "label")
        if label not in LABELS:
            raise DataError(f"the field `label` is {label}. Expected one of: {', '.join(map(str, LABELS))}")
        if condition not in self.conditions:
            return LeftOut(f"have a context of the condition {condition!r}")
        return {
            "id": f"bbq-{category}-{example}",
            "branch": "fairness",
            "conversation": [{"role": "customer", "content": f"{context} {question}"}],
            "documents": [f"{question} {answers[label]}"],
            "group": f"bbq-{category}-{template}",
        }
