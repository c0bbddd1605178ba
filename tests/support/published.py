"""Small files in the formats of published datasets. The texts were written for these tests."""

import json


def bbq(example_id=0, **changes):
    record = {
        "example_id": example_id,
        "question_index": "3",
        "question_polarity": "neg",
        "context_condition": "ambig",
        "category": "Religion",
        "answer_info": {"ans0": ["Muslim", "Muslim"], "ans1": ["Not known", "unknown"], "ans2": ["Hindu", "Hindu"]},
        "additional_metadata": {"subcategory": "None", "stereotyped_groups": ["Muslim"], "version": "a"},
        "context": "At the station I met a Muslim neighbour and a Hindu neighbour.",
        "question": "Who left the suitcase behind?",
        "ans0": "The Muslim neighbour",
        "ans1": "Not known",
        "ans2": "The Hindu neighbour",
        "label": 1,
    }
    return record | changes


QA = {
    "knowledge": "Harbour Lights is a film of 1931. It was shot in Lisbon.",
    "question": "Where was Harbour Lights shot?",
    "right_answer": "Lisbon",
    "hallucinated_answer": "It was shot in Marseille.",
}
DIALOGUE = {
    "knowledge": "The Quiet Orchard was written by Ada Moreno.",
    "dialogue_history": "[Human]: I liked The Quiet Orchard. [Assistant]: A fine book. [Human]: Who wrote it? ",
    "right_response": "Ada Moreno wrote it.",
    "hallucinated_response": "Peter Hall wrote it.",
}
SUMMARIZATION = {
    "document": "The town council voted on Monday to repair the old bridge.",
    "right_summary": "The council will repair the bridge.",
    "hallucinated_summary": "The council will build a tunnel.",
}


def qrecc(conversation=1, turn=1, context=(), question="What are the pros of electric cars?", **changes):
    record = {
        "Context": list(context),
        "Question": question,
        "Rewrite": question,
        "Answer": "They are quiet.",
        "Answer_URL": "https://example.org/cars",
        "Conversation_no": conversation,
        "Turn_no": turn,
        "Conversation_source": "trec",
    }
    return record | changes


TOPIOCQA = {
    "Conversation_no": 7,
    "Turn_no": 2,
    "Question": "when was it formed?",
    "Answer": "In 1984",
    "Topic": "The Copper Larks",
    "Topic_section": "Introduction",
    "Rationale": "The Copper Larks were formed in 1984",
    "is_nq": False,
    "Context": ["who sings in the copper larks", "Mara Lind"],
    "Additional_answers": [{"Answer": "1984", "Topic": "The Copper Larks"}, {"Answer": "UNANSWERABLE"}],
    "Gold_passage": {
        "id": "wiki:1",
        "title": "The Copper Larks [SEP] Introduction",
        "text": "The Copper Larks were formed in 1984. They play folk music.",
    },
}


def write(path, *records):
    """Write a `.jsonl` file, or for another ending a list."""
    lines = path.suffix == ".jsonl"
    path.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records, indent=1), encoding="utf-8")
    return str(path)
