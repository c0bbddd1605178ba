"""The bench of peers: what would end an arm minutes later is refused before the first one."""

import pytest

from benchmarks.peers import __main__ as peers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "ours_0", "theirs_2"], "unknown arm theirs_2"),
        (["--arms", "ours_0", "ours_partial"], "ours_partial has no number"),
        (["--arms", "ours_0", "verl_sync"], "has no verl, which verl_sync needs"),
        (["--arms", "ours_0", "--micro_batch", "7"], "--micro_batch 7 does not divide"),
    ],
)
def test_an_arm_that_can_not_run_is_refused_before_the_first_one(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "run_arm", None)  # nothing is started
    with pytest.raises(SystemExit, match=message):
        peers.main([*words, "--logs", str(tmp_path / "logs"), "--shape", "tiny"])
    assert not (tmp_path / "logs").exists()


def test_weights_of_another_shape_are_not_measured_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 7}')
    with pytest.raises(SystemExit, match=r"another shape than tiny: {'hidden_size': 7}"):
        peers.make_weights("tiny", tmp_path, 8, 1)
