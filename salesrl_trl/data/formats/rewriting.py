"""Conversational query rewriting: QReCC and TopiOCQA.

The last question of a record can't be understood without the turns before it. The policy's query has to say what it
means. Profile and summary state only what was said, so the rows belong to `hallucination`.
"""

from collections.abc import Mapping

from salesrl_trl.data.columns import alternating
from salesrl_trl.data.formats.base import DatasetFormat, LeftOut, number_of, text_of
from salesrl_trl.data.rows import shape
from salesrl_trl.errors import DataError

UNANSWERABLE = "UNANSWERABLE"
"""TopiOCQA's answer to a question that Wikipedia does not answer."""
NO_ANSWER = LeftOut("have no known answer")


class QReCC(DatasetFormat):
    """Files of https://github.com/apple/ml-qrecc (Anantha et al., 2021, https://arxiv.org/abs/2010.04898).

    A file is a list of objects with `Context` (questions and answers in turn), `Question`, `Rewrite`, `Answer`,
    `Answer_URL`, `Conversation_no`, `Turn_no` and `Conversation_source`.

    The judge gets `Answer` as the known document. Records without an answer are left out. `Rewrite`, a person's query,
    is not used: many other queries find the same answer, and the judge sees what was found. All turns of a
    `Conversation_no` are one group.
    """

    def row(self, record: Mapping[str, object]) -> dict[str, object] | LeftOut:
        row = _turn_of_conversation("qrecc", record)
        answer = text_of(record, "Answer", may_be_blank=True)
        return {**row, "documents": [answer]} if answer else NO_ANSWER


class TopiOCQA(DatasetFormat):
    """Files of https://huggingface.co/datasets/McGill-NLP/TopiOCQA (Adlakha et al., 2022,
    https://arxiv.org/abs/2110.00768).

    A file is a list of objects, or has one a line, with `Conversation_no`, `Turn_no`, `Question`, `Answer`, `Topic`,
    `Topic_section`, `Rationale`, `is_nq`, `Context` (questions and answers in turn), `Additional_answers` (objects
    with an `Answer`) and `Gold_passage` (`id`, `title`, `text`).

    The judge gets the answer, and where they are there the answers of other annotators, the rationale and the gold
    passage. Questions that are marked as unanswerable are left out. All turns of a `Conversation_no` are one group.
    """

    def row(self, record: Mapping[str, object]) -> dict[str, object] | LeftOut:
        row = _turn_of_conversation("topiocqa", record)
        answer = text_of(record, "Answer", may_be_blank=True)
        if not answer or answer == UNANSWERABLE:
            return NO_ANSWER
        others, passage = record.get("Additional_answers") or [], record.get("Gold_passage") or {}
        if not isinstance(others, list) or not all(isinstance(each, Mapping) for each in others):
            raise DataError(f"the field `Additional_answers` is {shape(others)}. Expected a list of objects")
        if not isinstance(passage, Mapping):
            raise DataError(f"the field `Gold_passage` is {shape(passage)}. Expected an object with a `text`")
        texts = [answer, *(text_of(other, "Answer", may_be_blank=True) for other in others)]
        texts += [text_of(record, "Rationale", may_be_blank=True)] if record.get("Rationale") is not None else []
        texts += [text_of(passage, "text")] if passage else []
        return {**row, "documents": [text for text in dict.fromkeys(texts) if text and text != UNANSWERABLE]}


def _turn_of_conversation(name: str, record: Mapping[str, object]) -> dict[str, object]:
    """The columns that both datasets give alike."""
    conversation, turn = number_of(record, "Conversation_no"), number_of(record, "Turn_no")
    context, question = record.get("Context"), text_of(record, "Question")
    if not isinstance(context, list) or not all(isinstance(text, str) for text in context) or len(context) % 2:
        raise DataError(f"the field `Context` is {shape(context)}. Expected a list of texts: question, answer, ...")
    turns = alternating([*(text_of({"Context": text}, "Context", may_be_blank=True) for text in context), question])
    return {
        "id": f"{name}-{conversation}-{turn}",
        "branch": "hallucination",
        "conversation": [each for each in turns if each["content"]],  # an answer that was not found is blank
        "group": f"{name}-{conversation}",
    }
