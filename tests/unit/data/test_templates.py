"""A prompt of one's own: the fields of a template, and the messages about one that does not work."""

import hashlib
import json
from importlib import resources

import pytest

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.data.prompts import PROMPT_STYLES, PromptTemplate, build_prompt, read_template
from salesrl_trl.launch.data.sources import load_rows
from salesrl_trl.types import DEFAULT_FORMAT, Message, SalesRow

ROW = SalesRow(
    row_id="r7",
    branch="tone",
    conversation=(Message(role="customer", content="Hi 13800000000"), Message(role="customer", content=" Why? \n")),
    documents=("It costs 5.",),
)


def template(source):
    return PromptTemplate(source, "mine.jinja", DEFAULT_FORMAT.fields)


# Of the prompts as they were when their text stood in the code: sha256 of the JSON of all 960 demo prompts in order.
@pytest.mark.parametrize(
    ("style", "digest"),
    [("instruct", "d5f11cabb0294da0"), ("compact", "3cccff390322946b"), ("few_shot", "61093ffa95e7e671")],
)
def test_the_packaged_prompts_are_byte_for_byte_what_policies_were_trained_on(style, digest):
    rows = load_rows("demo", "train", ("fairness", "hallucination"))
    prompts = json.dumps([build_prompt(row, style) for row in rows], ensure_ascii=False)
    assert hashlib.sha256(prompts.encode()).hexdigest()[:16] == digest


def test_what_a_customer_wrote_keeps_its_white_space():
    assert build_prompt(ROW, "compact") == [
        {"role": "user", "content": "customer: Hi 13800000000\ncustomer:  Why? \n"}
    ]


@pytest.mark.parametrize("style", PROMPT_STYLES)
def test_a_copy_of_a_packaged_prompt_prompts_alike(tmp_path, style):
    mine = tmp_path / "mine.jinja"
    packaged = resources.files("salesrl_trl.launch.data").joinpath("templates", f"{style}.jinja")
    mine.write_bytes(packaged.read_bytes())
    assert build_prompt(ROW, read_template(mine, DEFAULT_FORMAT.fields)) == build_prompt(ROW, style)


def test_the_text_is_the_user_message_and_the_block_the_system_message():
    mine = template(
        "{% block system %}\n  {% set tone = branch %}\n  Be {{ tone }}: {{ action_fields|join(', ') }}.\n"
        "{% endblock %}\n\n{% for turn in conversation %}[{{ turn.role }}] {{ turn.content|trim }} {% endfor %}\n"
        "{{ documents[0] }}\n\n"
    )
    assert build_prompt(ROW, mine) == [
        {"role": "system", "content": "Be tone: user_profile, rewritten_query, history_summary."},
        {"role": "user", "content": "[customer] Hi 13800000000 [customer] Why? It costs 5."},
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ context }}\n{% if %}", r"mine\.jinja, line 2 is not valid Jinja: Expected an expression"),
        ("{% block system %}{{ range(3)|list }}{% endblock %}Write JSON.", "never shows the conversation"),
    ],
    ids=["syntax", "no conversation"],
)
def test_a_template_that_can_not_work_is_refused_by_its_line(source, message):
    with pytest.raises(ConfigError, match=message):
        template(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if branch == 'price' %}{{ context }}{% endif %}", "renders an empty user message for row 'r7'"),
        ("{{ context.__class__ }}", r"mine.jinja fails for row 'r7' .*\(SecurityError\)"),
        ("{{ context }}{{ branhc }}", r"\(UndefinedError: 'branhc' is undefined\)"),
    ],
    ids=["empty", "sandbox", "variable"],
)
def test_a_template_that_fails_on_a_row_names_the_row_and_quotes_no_customer(source, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_prompt(ROW, template(source))
    assert "13800000000" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), (b"a\ncaf\xe9", r"line 2, byte 4 \(0xe9\) is not UTF-8")]
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, message):
    if content:
        (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_template(tmp_path / "mine.jinja", DEFAULT_FORMAT.fields)
