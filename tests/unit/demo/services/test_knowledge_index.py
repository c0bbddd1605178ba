"""The index: words of two languages, the score's formula, the knowledge base's file."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salesrl_trl.data.files import Document, load_documents
from salesrl_trl.demo.services.rubric import sentences, words
from salesrl_trl.demo.services.services_app import KnowledgeIndex
from salesrl_trl.errors import DataError

FRUIT = KnowledgeIndex([Document(id="a", text="apple"), Document(id="p", text="pear")])
COURSES = KnowledgeIndex(
    [
        Document(id="zh-price", title="Python数据分析 价格", text="Python数据分析课程的价格是3800元。"),
        Document(id="en-price", title="Watercolour price", text="The watercolour course costs 1,200 yuan."),
    ]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("The courses and the classes", ["course", "class"], id="plurals-and-stop-words"),
        pytest.param("Python’s price: 3,800 yuan", ["python", "price", "3800", "yuan"], id="possessive-and-thousands"),
        pytest.param("C++ or C# at 19:30", ["c++", "c#", "19:30"], id="symbols-and-clock"),
        pytest.param("数据分析的价格", ["数据分析", "价格"], id="chinese"),
        pytest.param("Ｐｙｔｈｏｎ　３８００ py\u200bthon ，。!?", ["python", "3800", "python"], id="odd characters"),
    ],
)
def test_words_are_cut_and_folded(text, expected):
    assert words(text) == expected


def test_overlapping_words_hold_the_parts_of_a_long_one():
    assert words("数据分析", overlapping=True) == ["数据", "分析", "数据分析"]


def test_sentences_end_at_full_stops_of_both_languages_but_not_in_figures():
    assert sentences("It costs 1.5 yuan. Really! 价格3元。好") == ["It costs 1.5 yuan.", "Really!", "价格3元。", "好"]


def test_unknown_word_lowers_the_score():
    # N = 2, n(apple) = 1, so idf = ln(1 + 1.5 / 1.5) = ln 2, and idf(unseen) = ln(1 + 2.5 / 0.5) = ln 6. Both
    # documents have one token, the average, so the term part is 1 / (1 + 0.9): score = (ln 2 / 1.9) / (ln 2 + ln 6).
    (passage,) = FRUIT.search("apple kiwi", 5, 0.0)
    assert passage.score == pytest.approx(math.log(2) / 1.9 / (math.log(2) + math.log(6)), rel=1e-5)


def test_repeated_word_counts_as_often_as_it_stands_and_threshold_and_top_k_bound():
    # Three tokens of equal idf: apple has two of them, pear one, each at 1 / 1.9.
    first, second = FRUIT.search("apple pear apple", 5, 0.0)
    assert (first.id, second.id) == ("a", "p")
    assert (first.score, second.score) == pytest.approx((2 / 3 / 1.9, 1 / 3 / 1.9), rel=1e-5)
    assert [passage.id for passage in FRUIT.search("apple pear apple", 5, 0.2)] == ["a"]
    assert FRUIT.search("apple", 5, 0.53) == ()
    assert [passage.id for passage in FRUIT.search("apple pear", 1, 0.0)] == ["a"]  # equal scores: the first stands


def test_query_without_a_known_word_finds_nothing():
    assert [FRUIT.search(query, 5, 0.0) for query in ("", "kiwi", "the of and", "的了吗")] == [()] * 4


@settings(max_examples=60)
@given(st.text(max_size=80))
def test_score_lies_between_0_and_1_for_any_query(query):
    scores = [passage.score for passage in COURSES.search(query + " 价格 price", 10, 0.0)]
    assert scores == sorted(scores, reverse=True)
    assert all(0.0 < score < 1.0 for score in scores)


def test_documents_are_read_with_and_without_title(tmp_path):
    path = tmp_path / "k.jsonl"
    # a line separator (U+2028) within a text ends no line of the file
    path.write_text(
        '{"id": "1", "text": "a\u2028a", "lang": "en"}\n\n{"id": "2", "title": "t", "text": "b"}\n', "utf-8"
    )
    assert load_documents(path) == (Document(id="1", text="a\u2028a"), Document(id="2", text="b", title="t"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("\n", "contains no documents", id="empty"),
        pytest.param('{"id": "1", "text": "a"}\n{"id":', "line 2 is not JSON", id="cut-off"),
        pytest.param("[" * 100_000, "line 1 can't be read", id="nested-too-deep"),
        pytest.param('{"id": "1", "text": " "}', "line 1 is not a document", id="blank-text"),
        pytest.param('{"id": "1", "text": "a"}\n{"id": "1", "text": "b"}', "line 2: id '1' is used twice", id="twice"),
    ],
)
def test_bad_knowledge_base_names_the_line(tmp_path, content, message):
    path = tmp_path / "k.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(DataError, match=message):
        load_documents(path)
