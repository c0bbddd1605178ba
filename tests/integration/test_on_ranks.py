"""The judge's meter, a replay and tools on two ranks."""

import pytest
from integration import on_ranks
from integration.on_ranks import ONSET, STEPS
from support.keyed import make_calling_policy
from support.ranks import of_one_machine, run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def told(out):
    policy = make_calling_policy(out / "policy", max_position_embeddings=2048)
    one, other = run_ranks(of_one_machine(), (on_ranks.__file__, policy, out), out, 240, OMP_NUM_THREADS="1")
    return {name: (one[name], other[name]) for name in one}


def test_they_ask_for_their_own_completions_and_change_to_the_second_judge_with_the_same_batch(told):
    one, two = told["meter"]
    assert one["judges"] == two["judges"]
    since = one["judges"].index([True])
    assert ONSET < since < STEPS - 1 and one["judges"] == [[False]] * since + [[True]] * (STEPS - since)
    assert one["tags"] == two["tags"] and one["logged"] == two["logged"]
    assert one["second"] > 0 and two["second"] > 0


def test_a_replay_ends_with_the_same_weights(told):
    for rank in told["replay"]:
        assert len(set(rank["earned"])) == len(rank["earned"]) == 4
        assert rank["again"] == rank["earned"]
        assert rank["same_weights"]
        orders, again = rank["orders"]
        assert len({str(order) for order in orders if order[0]}) > 1  # as rewards came in
        assert again == orders


def test_an_environment_and_its_services_are_counted_alike(told, out):
    one, other = told["tools"]
    for mine, theirs in zip(one, other, strict=True):
        same = {name for name in mine if not name.startswith(("time/", "perf/"))} - {"step_time"}
        assert mine.keys() == theirs.keys() == one[0].keys()
        assert {name: mine[name] for name in same} == pytest.approx({name: theirs[name] for name in same}, nan_ok=True)
    # rank 1 puts four times and asks two prices; rank 0 from the second step on
    counts = {name: [line[name] for line in one] for name in one[0] if name.startswith(("tools/p", "services/"))}
    assert counts["tools/put/calls"] == [4, 8, 8]
    assert counts["tools/put/failures"] == [0, 4, 0]
    assert counts["tools/price/calls"] == [2, 2, 4]
    assert counts["services/shelf/calls"] == [6, 10, 12]
    failed = [counts[f"services/shelf/{name}"] for name in ("failures", "held_back")]
    assert [sum(each) for each in zip(*failed, strict=True)] == [0, 4, 0]
    assert [line["outcome/infra"] for line in one] == [0, 0.5, 0]
    said = (out / "stderr0.txt").read_text()
    assert all(words in said for words in ("failures tool_put_http_503=4", "tool         put", "tool         price"))
