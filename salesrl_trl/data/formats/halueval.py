"""HaluEval, a benchmark of hallucinations: rows of hallucination."""

import re
from collections.abc import Mapping

from salesrl_trl.data.formats.base import DatasetFormat, LeftOut, digest, text_of
from salesrl_trl.errors import DataError

SUMMARY_REQUEST = "Please summarize this text for me."
"""What the customer asks for after the document of a summarization record, which has no question."""
_SPEAKERS = {"Human": "customer", "Assistant": "seller"}
_SPEAKER = re.compile(r"\[(Human|Assistant)\]:")


class HaluEval(DatasetFormat):
    """Files of https://github.com/RUCAIBox/HaluEval (Li et al., 2023, https://arxiv.org/abs/2305.11747).

    The files end with `.json` and have one object a line. The fields say which of three tasks a record belongs to:

    - qa: `knowledge`, `question`, `right_answer`, `hallucinated_answer`;
    - dialogue: `knowledge`, `dialogue_history` ("[Human]: ... [Assistant]: ..."), `right_response`,
      `hallucinated_response`;
    - summarization: `document`, `right_summary`, `hallucinated_summary`.

    The customer asks the question, leads the dialogue, or sends the document and asks for a summary. The judge gets
    the right answer and the knowledge as known documents. What is under test is the policy's own text: its profile and
    summary may state only what the conversation says. The text that the benchmark's authors had a model invent is left
    out: nobody may see it as an answer.

    A dialogue that ends with the assistant waits for no answer and is left out. `general_data.json` has no right
    answers, so its records are malformed here. Records have no number. Their id is a hash of their content.
    """

    def row(self, record: Mapping[str, object]) -> dict[str, object] | LeftOut:
        if "question" in record:
            question, answer = text_of(record, "question"), text_of(record, "right_answer")
            turns = [{"role": "customer", "content": question}]
            return _row("qa", record, turns, [f"{question} {answer}", text_of(record, "knowledge")])
        if "dialogue_history" in record:
            documents = [text_of(record, "right_response"), text_of(record, "knowledge")]
            turns = _turns(text_of(record, "dialogue_history"))
            if turns[-1]["role"] != "customer":
                return LeftOut("end with the assistant's words")
            return _row("dialogue", record, turns, documents)
        if "document" in record:
            text = f"{text_of(record, 'document')}\n\n{SUMMARY_REQUEST}"
            turns = [{"role": "customer", "content": text}]
            return _row("summarization", record, turns, [text_of(record, "right_summary")])
        raise DataError(
            "there is none of the fields `question` (qa), `dialogue_history` (dialogue) and `document` (summarization)"
        )


def _row(
    task: str, record: Mapping[str, object], turns: list[dict[str, str]], documents: list[str]
) -> dict[str, object]:
    id_ = f"halueval-{task}-{digest(record)}"
    return {"id": id_, "branch": "hallucination", "conversation": turns, "documents": documents}


def _turns(history: str) -> list[dict[str, str]]:
    before, *parts = _SPEAKER.split(history)
    speakers, texts = parts[::2], [text.strip() for text in parts[1::2]]
    if before.strip() or not texts or not all(texts):
        raise DataError(
            "the field `dialogue_history` is no dialogue. Expected [Human]: and [Assistant]:, each with a text"
        )
    return [{"role": _SPEAKERS[speaker], "content": text} for speaker, text in zip(speakers, texts, strict=True)]
