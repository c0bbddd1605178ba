"""Two ranks that see different things, while rollouts are ahead."""

import statistics
from collections import Counter

import pytest
import torch
from faults import two_ranks
from faults.two_ranks import DEADLINE_S, EQUAL_TRAINED, HANGS_S, LATE_S
from support.ranks import of_one_machine, run_ranks
from support.seconds import check_seconds

LAUNCH_LIMIT_S = 240


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_that_see_different_things_do_the_same(tiny, tmp_path):
    arguments = (two_ranks.__file__, tiny, tmp_path)
    one, other = run_ranks(of_one_machine(), arguments, tmp_path, LAUNCH_LIMIT_S, OMP_NUM_THREADS="1")
    for name in one:
        assert one[name]["error"] == other[name]["error"], name
        assert one[name]["steps"] == other[name]["steps"], name
        assert len({tuple(keys) for rank in (one, other) for keys in rank[name]["keys"]}) == 1, name
        assert one[name]["weights"] == other[name]["weights"], name
    # one rank's rewards all fail: half of all are scored
    assert one["too_few"]["error"] == "TooFewRewardsError"
    assert one["too_few"]["skipped"] == other["too_few"]["skipped"] == [1, 1, 1]
    # one of four is scored on rank 1
    assert one["enough"]["error"] is None
    assert one["enough"]["skipped"] == other["enough"]["skipped"] == [0] * 6
    assert one["enough"]["staleness"] == [0, 1, 2, 2, 2, 2]
    assert one["enough"]["quick"] == [{"broken": 3}]  # of eight completions, four on each rank
    # each rank trains on those of its own groups that are in, and both wait for each other's
    groups = [rank["by_groups"] for rank in (one, other)]
    assert max(groups[0]["waited"]) > 2 * max(groups[0]["batching"][1:])  # of both: one's rewards came late
    assert groups[0]["staleness"] == groups[1]["staleness"]
    assert sum(groups[0]["staleness"]) == pytest.approx(sum(min(step, 2) for step in range(10)))
    assert 2 < max(groups[0]["oldest"]) <= 5
    for rank, own in enumerate(groups):
        assert sorted(own["samples"]) == [200 * rank + number for number in range(80)]
        assert own["samples"] != sorted(own["samples"])
    assert groups[0]["order"] != groups[1]["order"]
    # what one rank replaces, the other generates too: all that they train on teaches
    for name in ("refilled", "refilled_at_once"):
        assert one[name]["figures"][EQUAL_TRAINED] == [0.0] * 6
        assert sum(one[name]["refilled"]) > 0
    # where all groups in flight of one rank were equal, a run goes on with those of the other, and both generate alike
    for name, again in (("saved", 0), ("saved_rows", 16)):
        went_on = [rank["went_on" + name.removeprefix("saved").replace("_", "_with_")] for rank in (one, other)]
        assert went_on[0]["generated"] == went_on[1]["generated"] < one[name]["generated"] - 16 + again, name
        assert [len(own["samples"]) for own in went_on] == [8 * 4] * 2
    assert (tmp_path / "stderr0.txt").read_text().count("resuming with 2 rollouts in flight") == 2
    # of two functions one applies to half of each group on rank 1: that half counts for nothing, on both
    assert one["functions"]["infra"] == other["functions"]["infra"] == [0.25, 0.25]
    assert (one["functions"]["reasons"], other["functions"]["reasons"]) == ([""], [""])  # told apart later, by group
    assert {"of_rank_0", "rewards/numbered/part", "rewards/partly/mean"} <= set(other["functions"]["keys"][0])
    # one rank is told to stop while both wait for rewards
    first, second = (rank["stopped"]["moments"] for rank in (one, other))
    assert one["stopped"]["error"] == "RunStopped"
    # the step whose rewards both gave up is undone
    assert first["said"].startswith("stopped by SIGTERM of another process after 1 steps.")
    assert second["said"].startswith("stopped by SIGTERM after 1 steps.")
    check_seconds(first["cut_off"] - second["asked"], most=2.0, what="until the other rank waited no more")
    assert max(first["ended"], second["ended"]) - second["asked"] < HANGS_S / 4
    # the backend raises on one rank; on the other it hangs and goes on when it is cancelled
    raised, hung = (rank["raised_and_hung"] for rank in (one, other))
    print(f"deadline {DEADLINE_S} s; steps on the rank that raises {raised['seconds']}, that hangs {hung['seconds']}")
    assert (raised["reasons"], hung["reasons"]) == (["raised_ValueError"], ["deadline"])
    assert raised["infra"] == hung["infra"] == [1.0, 1.0]  # the other rank's are counted too
    assert raised["rewards"] == hung["rewards"] == [None, None]
    grace_s = 1.0  # of a call that is cancelled
    check_seconds(max(*raised["seconds"], *hung["seconds"]), most=DEADLINE_S + grace_s + 1.5)
    stderr = (tmp_path / "stderr0.txt").read_text()
    assert "raised ValueError at" in stderr
    assert "a customer's words" not in stderr
    # what a rank waits for the rewards of another is such a wait too, not work of its own: the mean is above a half
    assert statistics.median(one["one_late"]["waited"]) > 0.6 * LATE_S
    # rank 0 has its first group last, rank 1 its last one
    for last, rank in ((0, one), (3, other)):
        parts, whole = rank["parts"], rank["whole"]
        for order in parts["order"]:
            assert sorted(order) == [0, 1, 2, 3]
            assert order[-1] == last  # and neither waits for what is late on the other
        assert sorted(parts["samples"]) == sorted(whole["samples"])
        assert max(Counter(parts["samples"]).values()) == 1
        for mine, theirs in zip(parts["gradients"], whole["gradients"], strict=True):
            mine, theirs = torch.tensor(mine), torch.tensor(theirs)
            assert theirs.norm() > 1e-4
            assert (mine - theirs).norm() <= 1e-4 * theirs.norm()  # a micro-batch too few is off by 1e-1
        for name in ("reward", "reward_std", "loss", "grad_norm", "completions/mean_length", "num_tokens"):
            assert parts["figures"][name] == pytest.approx(whole["figures"][name], rel=1e-5, abs=1e-6), name
