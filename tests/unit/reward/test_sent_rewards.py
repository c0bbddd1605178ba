"""Which rewards go to a process of their own, and what of a row goes with them."""

import logging

import pytest
from support import deadly
from support.loopback import build_reward
from support.loopback import row as example

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch import assembly
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.reward.remote import RemoteReward

NOBODY = "http://127.0.0.1:9"  # nothing is asked
SECRETS = ("rag-secret", "judge-secret")


def test_of_a_row_goes_what_is_read():
    row = {"row": 3, "prompt": "p", "trainer_state": object()}
    assert RemoteReward(build_reward(NOBODY, [example()]))._sent(row) == {"row": 3}
    assert RemoteReward(deadly.everything)._sent(row) == {"row": 3, "prompt": "p"}
    several = MixedReward([deadly.together, deadly.one_by_one], [1.0, 1.0])
    assert RemoteReward(several)._sent(row) == {"prompt": "p"}


@pytest.mark.parametrize("can_be_sent", [True, False])
@pytest.mark.parametrize("setting", [None, True, False])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_run_has_its_chain_in_a_child_where_it_wants_and_can(caplog, setting, on_cpu, can_be_sent):
    chain = build_reward(NOBODY, [example()])
    if not can_be_sent:
        chain.hook = lambda: None
    is_wanted = setting if setting is not None else not on_cpu
    if setting and not can_be_sent:
        with pytest.raises(ConfigError, match=r"can't be sent to a separate .*`reward_process: false`") as caught:
            assembly.placed(chain, setting, on_cpu)
        assert not any(secret in str(caught.value) for secret in SECRETS)
        return
    with caplog.at_level(logging.WARNING):
        placed = assembly.placed(chain, setting, on_cpu)
    assert isinstance(placed, RemoteReward) is (is_wanted and can_be_sent)
    assert placed.deadline_s == chain.deadline_s
    assert ("rewards stay in the trainer's process" in caplog.text) is (is_wanted and not can_be_sent)
