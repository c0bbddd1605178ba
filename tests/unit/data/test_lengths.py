"""Prompts that are too long: the rows with such prompts, and the three rules for them."""

import jinja2
import pytest

from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.launch.data.prompts import LengthLimit, fit_prompts, token_counter
from salesrl_trl.types import Message, SalesRow

LIMIT = LengthLimit(tokens=10, reason="12 less 2")


def row(*turns):
    return SalesRow(
        row_id=f"r{len(turns)}",
        branch="tone",
        conversation=tuple(Message(role="customer", content="x" * turn) for turn in turns),
    )


def count(prompts):
    return [sum(message["content"].count("x") for message in prompt) for prompt in prompts]


def fit(rows, rule, limit=LIMIT):
    return fit_prompts(rows, "compact", count, limit, rule, "training")


def test_prompts_that_fit_are_left_as_they_are():
    rows = [row(4, 6), row(1)]  # 10 and 1 tokens of 10
    for limit in (LIMIT, None):
        fitted = fit(rows, "error", limit)
        assert (fitted.rows, count(fitted.prompts), fitted.note) == (rows, [10, 1], None)


def test_an_error_names_the_rows_by_their_place():
    rows = [row(4, 6), *[row(11 + at) for at in range(7)], row(1)]  # rows 1 to 7 have 11 to 17 tokens
    with pytest.raises(DataError) as caught:
        fit(rows, "error")
    assert str(caught.value).startswith(
        "7 of 9 training rows have prompts of more than 10 tokens (12 less 2): row 1 (11 tokens), row 2 (12 tokens), "
        "row 3 (13 tokens), row 4 (14 tokens), row 5 (15 tokens) and 2 more."
    )


def test_rows_that_are_dropped_are_counted_and_named():
    rows = [row(11), row(3), row(12), row(4)]
    fitted = fit(rows, "drop")
    assert (fitted.rows, count(fitted.prompts)) == ([rows[1], rows[3]], [3, 4])
    assert fitted.note.startswith("2 of 4 training rows")
    assert "dropped (`long_prompts: drop`): row 0 (11 tokens), row 2 (12 tokens)." in fitted.note
    with pytest.raises(DataError, match="no row is left"):
        fit([row(11)], "drop")


def test_as_few_of_the_oldest_turns_as_it_takes_are_left_out_of_the_prompt_alone():
    # Of (5, 4, 3, 2, 1) the last four make 10, of (2,) * 9 the last five; (9, 1, 9) keeps its last two; (3, 3) fits.
    rows = [row(5, 4, 3, 2, 1), row(*[2] * 9), row(3, 3), row(9, 1, 9)]
    fitted = fit(rows, "truncate_oldest_turns")
    assert fitted.rows == rows
    assert [prompt[0]["content"].count("customer") for prompt in fitted.prompts] == [4, 5, 2, 2]
    assert count(fitted.prompts) == [10, 10, 6, 10]
    assert "3 of 4 training rows" in fitted.note and "row 0 (15 tokens), row 1 (18 tokens), row 3 (19" in fitted.note


def test_a_last_turn_that_is_too_long_by_itself_can_not_be_truncated():
    with pytest.raises(DataError, match=r"1 of 3 training rows .* even with only the last turn: row 2 \(14 tokens\)"):
        fit([row(3), row(9, 9), row(3, 11)], "truncate_oldest_turns")


def test_the_chat_template_counts():
    asked = []

    class Tokenizer:
        def apply_chat_template(self, conversation, **options):
            asked.append((list(conversation), options))
            return {"input_ids": [[0] * (3 + len(prompt[0]["content"])) for prompt in conversation]}

    one, other = ([{"role": "user", "content": text}] for text in ("ab", "abc"))
    assert token_counter(Tokenizer(), {"enable_thinking": False})([one, other, one]) == [5, 6, 5]
    ((prompts, options),) = asked
    assert prompts == [one, other, one]
    assert options["add_generation_prompt"] and options["tokenize"] and options["enable_thinking"] is False


def test_a_chat_template_that_takes_no_system_message_is_told_of():
    class Tokenizer:
        def apply_chat_template(self, conversation, **options):
            raise jinja2.TemplateError("System role not supported")

    with pytest.raises(ConfigError, match="rejects the prompts: System role not supported"):
        token_counter(Tokenizer())([[{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]])
