"""The page in a real browser: opened, filtered, clicked, by the keyboard and as a screen reader gets it."""

import itertools
import json
import time
from contextlib import ExitStack, closing

import pytest
from support.browser import browser, why_skipped
from support.synthetic_record import GROUP, HOSTILE, Rank
from support.viewing import served

from salesrl_trl.record.report import write_report
from salesrl_trl.record.view import queries
from salesrl_trl.record.view.page import ASSETS

pytestmark = pytest.mark.skipif(why_skipped() is not None, reason=str(why_skipped()))
SETTLED = "document.querySelector('main h1') && document.querySelector('main').getAttribute('aria-busy') === 'false'"
FIRST = "document.querySelector('.items a.open')"
USED = ("button", "link", "combobox", "searchbox", "spinbutton", "checkbox", "textbox", "table", "navigation")
IDS = "[...document.querySelectorAll('.items a.open')].map(e => e.dataset.id)"
FOCUSED = "document.activeElement"
visits = itertools.count()


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


@pytest.fixture
def opened(tab, viewer):
    """The page on an address: loaded if it is not there, else as by a link in it. At the end nothing went wrong."""

    def go(address="", lang="en", *, anew=False):
        tab.size(1200, 700)
        asks = "&" if "?" in address else "?" if address else "#overview?"
        address = f"{address}{asks}lang={lang}&visit={next(visits)}"
        if anew or not tab.value("location.href").startswith(viewer.url):
            tab.open(f"{viewer.url}?{next(visits)}{address}")
        else:
            tab.value(
                "new Promise(done => { addEventListener('hashchange', done, {once: true}); "
                f"location.hash = {json.dumps(address)}; }}).then(() => true)"
            )
        tab.wait(f"{SETTLED} && !document.querySelector('.notice')")
        return tab

    tab.problems.clear()
    yield go
    assert tab.problems == []


@pytest.fixture
def new_rank(tmp_path):
    with ExitStack() as stack:

        def make(run=tmp_path, **meta):
            rank = Rank(run, 0, **meta)
            stack.enter_context(closing(rank.file))
            return rank

        yield make


@pytest.fixture
def show(tab, tmp_path):
    """Opens a page on the record of some runs, that of `tmp_path` by default, in a server of its own."""
    with ExitStack() as stack:

        def go(address, condition=SETTLED, *, runs=(tmp_path,), lang="en"):
            viewer = stack.enter_context(served(*runs))
            tab.open(f"{viewer.url}#{address}{'&' if '?' in address else '?'}lang={lang}")
            tab.wait(condition)
            return tab

        yield go
        tab.open("about:blank")  # so that it asks no server that has ended


def count(tab):
    return int(tab.text(".count strong").split()[0].replace(",", ""))


def test_it_opens_on_steps_by_branch_and_a_step_leads_to_its_completions(opened, viewer):
    tab = opened()
    step = queries.overview(viewer.index, {})["steps"][-2]  # of the last step, by branch
    shown = tab.text("tbody tr").split("\t")
    assert shown[:3] == [str(step["step"]), step["branch"], f"{step['reward']:.3f}"]
    assert len(tab.value("[...document.querySelectorAll('figure path.line')].map(e => e.getAttribute('d'))")) > 4
    pictures = [name for role, name in tab.accessible() if role in ("image", "img")]
    assert any(name.startswith("Mean reward by step: fairness from 0.") for name in pictures)
    tab.click("tbody th a")
    tab.wait("location.hash.startsWith('#list')")
    tab.wait(f"{SETTLED} && document.querySelector('.count')")
    assert count(tab) == step["many"]


def test_filters_by_hand_change_the_list_and_the_address(opened, viewer):
    tab = opened("#list")
    assert count(tab) == 2 * 1536  # of training
    tab.choose("select[name=outcome]", "invalid_action")
    tab.choose("select[name=branch]", "fairness")
    tab.click("input[name=text]")
    tab.type("价格")
    wanted = {"outcome": "invalid_action", "branch": "fairness", "text": "价格", "mode": "train"}
    total = queries.listing(viewer.index, wanted)["total"]
    found = f"document.querySelector('.count strong').innerText.startsWith('{total} ')"
    tab.wait(f"location.hash.includes('text=') && {found}")
    assert 0 < total < 200
    assert "branch=fairness" in tab.value("location.hash")
    # The address alone gives the same list again.
    address = tab.value("location.hash")
    again = opened(address, anew=True)
    assert count(again) == total
    assert again.value("document.querySelector('input[name=text]').value") == "价格"
    again.click(".filters a.button")
    again.wait("location.hash === '#list'")


def test_a_click_opens_the_whole_way_of_a_completion(opened, viewer):
    tab = opened("#list?outcome=ok&run=1&mode=train")
    item = queries.listing(viewer.index, {"outcome": "ok", "run": "1", "mode": "train"})["items"][0]
    tab.click(".items a.open")
    tab.wait(f"{SETTLED} && location.hash.startsWith('#completion')")
    tab.wait("document.querySelector('.messages')")
    heads = ("Conversation", "From the action (8B)", "Reference (32B)", "Scores", "Group", "Calls")
    shown = tab.text()
    assert [words for words in (*heads, f"{item['reward']:.3f}") if words not in shown] == []
    current = "[...document.querySelectorAll('tr[aria-current=true]')].map(e => e.parentElement.rows.length)"
    assert tab.value(current) == [GROUP]
    tab.click(".calls summary")
    tab.wait("document.querySelector('.calls details[open] pre').innerText.includes('query')")


def test_what_a_completion_holds_is_shown_and_never_run(opened):
    tab = opened("#list?run=0&text=onerror")
    assert count(tab) > 50
    tab.click(".items a.open")
    tab.wait("document.querySelector('pre.text')")
    assert json.dumps(HOSTILE)[1:-1] in tab.text("pre.text")
    assert HOSTILE in tab.value("[...document.querySelectorAll('td')].map(e => e.innerText).join('\\n')")
    assert tab.value("document.querySelectorAll('main img, main script').length") == 0
    assert tab.value("document.title") != "owned"


def test_the_keyboard_alone_goes_through_the_list_and_back(opened):
    tab = opened("#list?run=0", anew=True)
    ids = tab.value(IDS)
    for key in ("j", "ArrowDown", "j", "k"):
        tab.press(key)
    assert tab.value(f"{FOCUSED}.dataset.id") == ids[1]
    tab.press("Enter")
    tab.wait(f"document.title.includes('{ids[1]}')")
    assert tab.value(f"{FOCUSED}.tagName") == "H1"  # where a reader begins
    tab.press("j")
    tab.wait(f"document.title.includes('{ids[2]}')")
    tab.press("Escape")
    tab.wait("location.hash.startsWith('#list')")
    tab.wait(f"{FOCUSED}.dataset.id === '{ids[2]}'", "the focus comes back to where it was")
    tab.press("/")
    assert tab.value(f"{FOCUSED}.name") == "text"
    tab.type("j")  # in a field a key is a letter
    assert tab.value(f"{FOCUSED}.value") == "j"
    tab.press("Escape")
    assert tab.value(f"{FOCUSED}.tagName") == "BODY"
    tab.wait("location.hash.includes('text=j')")


def test_a_screen_reader_gets_names_for_all_there_is_to_use(opened):
    tab = opened("#list", anew=True)
    told = tab.accessible()
    used = [(role, name) for role, name in told if role in USED]
    assert [role for role, name in used if not name] == []
    assert {"Branch", "Outcome", "Reason", "Judge", "Mode"} <= {n for r, n in used if r == "combobox"}
    assert ("searchbox", "Text") in used
    assert {("heading", "Completions"), ("search", "Filters")} <= {*told}
    assert sum(role == "row" for role, _ in told) == 51  # 50 and the head
    # What changed is told, where it is asked for again.
    tab.choose("select[name=outcome]", "infra")
    tab.wait("document.querySelector('[aria-live=polite]').innerText.match(/^\\d+ completions$/)")
    assert tab.value("document.documentElement.lang") == "en"


@pytest.mark.parametrize("address", ["", "#list", "#completion?id=0-0-1", "#compare"])
def test_the_page_speaks_both_languages_and_320_pixels_need_no_sideways_scrolling(opened, address):
    """That is a window of 1,280 at 400 %."""
    tab = opened(address, lang="zh")
    assert tab.value("document.documentElement.lang") == "zh-CN"
    assert any("\u4e00" <= char <= "\u9fff" for char in tab.text("h1"))
    tab.size(320, 640)
    tab.wait("innerWidth === 320")
    assert tab.value("document.documentElement.scrollWidth") <= 320
    tab.click("header button.language")
    tab.wait("document.documentElement.lang === 'en'")
    assert not any("\u4e00" <= char <= "\u9fff" for char in tab.text("h1"))
    assert tab.value("document.documentElement.scrollWidth") <= 320


def test_both_languages_have_the_same_words(tab):
    source = (ASSETS / "words.js").read_text("utf-8").partition("const WORDS")[0]
    same = "JSON.stringify(Object.keys(EN)) === JSON.stringify(Object.keys(ZH)) && Object.keys(EN).length > 90"
    assert tab.value(f"(() => {{ {source} return {same}; }})()")
    marks = "String({}[k].match(/{{\\d}}/g)?.sort())"
    other = f"Object.keys(EN).filter(k => {marks.format('EN')} !== {marks.format('ZH')})"
    assert tab.value(f"(() => {{ {source} return {other}; }})()") == []


def test_two_runs_stand_side_by_side_and_a_row_leads_to_its_completions(opened, viewer):
    tab = opened("#compare")
    told = queries.comparison(viewer.index, {"one": "0", "other": "1"})
    assert f"{told['total']} shared rows" in tab.text()
    assert "+0.0" in tab.text("tbody")  # the second run was made better by 0.1
    tab.click("section:last-of-type tbody th a")
    tab.wait(f"location.hash.startsWith('#list?row=') && {FIRST}")
    row = told["rows"][0]["row"]
    assert count(tab) == queries.listing(viewer.index, {"row": row})["total"]


def test_heads_sort_the_whole_list(opened, viewer):
    tab = opened("#list")
    tab.click(".items th:has(a[href*='order=reward_high']) a")
    tab.wait("document.querySelector('.items th[aria-sort=descending]')?.innerText.startsWith('Reward')")
    wanted = queries.listing(viewer.index, {"mode": "train", "order": "reward_high"})["items"]
    assert tab.value(IDS) == [each["id"] for each in wanted]


def test_calls_are_bars_that_tell_retries_from_hedges(show, new_rank):
    rank = new_rank()
    body, times = rank.text("{}"), ((0.0, 1.0, "judge_timeout"), (2.0, 2.0, "cancelled"), (3.0, 0.5, ""))
    calls = [("judge", "/v1", 100 + at, took, failure, body, None) for at, took, failure in times]
    rank.add(seconds='{"queue": 0.5}', calls=calls)
    tab = show("completion?id=0-0-1", "document.querySelectorAll('.calls li').length === 4")
    kinds = tab.value("[...document.querySelectorAll('.calls rect')].map(e => e.getAttribute('class'))")
    assert kinds == ["waited", "failed attempt", "cancelled retry", "answered hedge"]
    # 4.5 s in all, from half a second before the first call: the hedge begins at 3.5 of them.
    left = tab.value("document.querySelectorAll('.calls rect')[3].getAttribute('x')")
    assert float(left) == pytest.approx(1000 * 3.5 / 4.5, abs=1)


def test_own_functions_stand_with_number_weight_words_and_calls(show, new_rank):
    said = (("right", 0.5, "nearly"), ("polite", None, "polite returned None"), ("len", 7.0, ""))
    verdicts = [(name, number, None, words, "") for name, number, words in said]
    new_rank(weights='{"right": 2.0, "polite": 1.0}').add(
        functions='{"right": 0.5, "polite": null}', parts='{"right/style": 0.25}', verdicts=verdicts,
        calls=[("grader", "group", at, 1.0, code, None, None) for at, code in ((0, "grader_busy"), (3, "given_up"))],
    )  # fmt: skip
    tab = show("completion?id=0-0-1", "document.querySelectorAll('.calls li').length === 2")
    rows = "[...document.querySelectorAll('section[aria-label=\"Scores\"] tr')].map(e => e.innerText)"
    assert tab.value(rows) == [
        "By\t\tNumber\tWeight\tReason", "right\tfunction\t0.500\t× 2\tnearly",
        "polite\tfunction\t–\t× 1\tpolite returned None", "len\tlogged\t7.000\t\t",
        "right/style\tcomponent\t0.250\t\t",
    ]  # fmt: skip
    first, second = tab.value("[...document.querySelectorAll('.calls li')].map(e => e.innerText)")
    assert "grader_busy" in first
    assert "attempt 2: retry" in second and "cancelled: deadline exceeded" in second
    tab.click(".calls summary")
    assert "grader for its whole group" in tab.text(".calls")


HEADS = "[...document.querySelectorAll('details.folded summary')].map(e => e.innerText)"
FOLDED = "document.querySelectorAll('details.folded').length === {}"


def test_thoughts_and_calls_of_tools_in_a_text_are_folded(show, new_rank):
    text = 'Well.<think>cheap</think><tool_call>{"name": "book", "arguments": {}}</tool_call>Booked.'
    new_rank().add(text=text)
    tab = show("completion?id=0-0-1", FOLDED.format(2))
    assert tab.value(HEADS) == ["Reasoning", "Tool call: book"]
    assert not tab.value("[...document.querySelectorAll('details.folded')].some(e => e.open)")
    assert tab.value("[...document.querySelectorAll('pre.text')].map(e => e.innerText)") == ["Well.", "Booked."]


def test_a_conversation_has_its_turns_and_each_answer_of_a_tool_the_time_of_its_call(show, new_rank, tmp_path):
    rank, start = new_rank(), 1_750_000_000.0
    asked = [{"function": {"name": "search", "arguments": {"query": query}}} for query in ("price", "hours")]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": asked},
        {"role": "tool", "name": "search", "content": "5980"},
        {"role": "tool", "name": "search", "content": "{'error': 'tool_search_http_503'}"},
        {"role": "assistant", "content": "It is 5980."},
    ]
    calls = [
        ("tool_search", "turn 1", start, 0.25, "", rank.text('{"query":"price"}'), rank.text("5980")),
        ("tool_search", "turn 1", start + 0.01, 1.5, "tool_search_http_503", rank.text('{"query":"hours"}'), None),
    ]
    rank.add(turns=rank.text(json.dumps(turns)), text="It is 5980.", calls=calls, reward=1.0)
    tab = show("completion?id=0-0-1", FOLDED.format(4))
    answers = ["Tool result · 0.25 s", "Tool result · 1.50 s · tool_search_http_503"]
    assert tab.value(HEADS) == [*["Tool call: search"] * 2, *answers]
    details = tab.value("[...document.querySelectorAll('.calls summary small')].map(e => e.innerText)")
    assert details == ["turn 1", "answered", "turn 1", "tool_search_http_503"]
    assert "It is 5980." in tab.text()


WORDS_OF_JUDGES = ["judge", "reference", "8b", "action", "verdict", "branch", "评审", "参考", "动作", "分支"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_task_without_judge_and_reference_has_no_words_for_them(show, new_rank, tmp_path, lang):
    for reward in (0.0, 1.0):
        run = tmp_path / "run"
        new_rank(run).add(reward=reward, text="42", branch="default", functions='{"right": 1.0}', tokens=2)
    for address in ("overview", "list", "completion?id=0-0-1"):
        tab = show(address, f"{SETTLED} && document.querySelectorAll('table').length", runs=[run], lang=lang)
        shown = tab.text("body").lower()
        assert [word for word in ("default", *WORDS_OF_JUDGES) if word in shown] == [], address


def test_of_two_runs_only_the_one_with_a_judge_is_judged(show, new_rank, tab, tmp_path):
    runs = [tmp_path / "judged", tmp_path / "own"]
    long = "benchmark:questions-about-people-Disability_status-" + "0" * 30
    judged = {"reference_reward": 0.25, "provider": "judge", "judge_s": 0.5, "row": long, "branch": "fairness"}
    new_rank(runs[0]).add(reward=0.5, **judged)
    new_rank(runs[1]).add(reward=0.5, row="1+1", branch="all")
    tab.size(1280, 800)
    show("list", f"{SETTLED} && document.querySelectorAll('.items tbody tr').length === 2", runs=runs)
    outcomes = tab.value("[...document.querySelectorAll('.items .outcome')].map(e => e.innerText)")
    assert sorted(outcomes) == ["judged", "scored"]
    assert tab.value("document.documentElement.scrollWidth") <= 1280
    tab.value("location.hash = '#compare?lang=en'")
    tab.wait("document.querySelector('h1').innerText === 'Two runs side by side'")
    assert tab.text("section:last-of-type") == "Rows in both runs\n\nNo rows were scored in both runs."


def test_the_report_is_a_tab(show, new_rank, two_branches):
    new_rank(two_branches.path).add(reward=0.5)
    first = "document.querySelector('.report h2')?.innerText"
    tab = show("report", f"{first} === 'Reward'", runs=[two_branches.path])
    tab.problems.clear()
    assert "75 % of steps within the band" in tab.text() and "reward_wait\t6.20 s\t62 %" in tab.text()
    assert tab.value("document.querySelectorAll('.report figure svg[role=img]').length") == 7
    tab.click("header button.language")
    tab.wait(f"{first} === '奖励'")
    tab.size(375, 800)
    tab.wait("innerWidth === 375")
    words = "[...document.querySelectorAll('.report figure text')].map(e => e.getBoundingClientRect())"
    tab.wait(f"Math.min(...{words}.map(box => box.height)) > 10")  # it is drawn anew
    assert tab.value(f"{words}.every(box => box.left >= 0 && box.right <= 375)")
    shown = tab.text()
    assert "KL 处于目标区间的训练步占 75%" in shown and "reward_wait\t6.20 秒\t62%" in shown
    tab.size(1200, 700)
    assert tab.problems == []


def test_the_report_of_the_command_is_the_tab_alone(tab, run_folder):
    evil = "<script>document.title = 'taken'</script>"
    run_folder.events({step: {f"reward/{evil}": 0.1, f"kl/{evil}": 10.0**step} for step in (1, 2)})
    tab.problems.clear()
    page = write_report(run_folder.path, language="zh")
    tab.open(page.as_uri())
    tab.wait("document.querySelector('.report h2')?.innerText === '奖励'")
    assert not tab.value("document.querySelector('nav')")  # there is nothing else in it
    assert evil[:30] in tab.text()
    assert "taken" not in tab.value("document.title")
    assert tab.value("document.querySelectorAll('.report figure').length") == 2
    tab.click("header button.language")
    tab.wait("document.querySelector('.report h2')?.innerText === 'Reward'")
    assert tab.problems == []
    tab.open("about:blank")


def test_a_run_that_goes_on_is_followed(show, new_rank):
    rank = new_rank()
    rank.add(text="first")
    tab = show("list", f"{FIRST}?.innerText === 'first'")
    rank.add(text="second", step=2)
    tab.click("input[name=text]")
    tab.wait("document.activeElement?.name === 'text'")
    typed = ""
    while "2 completions" not in tab.text(".runs"):  # it comes while somebody types
        tab.type("x")
        typed += "x"
        assert len(typed) < 200
        time.sleep(0.12)
    assert tab.value("document.querySelector('input[name=text]').value") == typed
    tab.value("location.hash = '#list?lang=en'")
    tab.wait(f"{FIRST}?.innerText === 'second'")
    tab.click(".follow input")
    rank.add(text="third", step=3)
    tab.wait("document.querySelector('.runs').innerText.includes('3 completions')")
    assert tab.value(f"{FIRST}.innerText") == "second"
