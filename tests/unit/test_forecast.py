"""`salesrl forecast`: what steps would take with other settings, played from a run's trace."""

import statistics
from itertools import count

import pytest

from salesrl_trl.forecast import RewardTime, TracedRun, TracedStep, forecast, main, read
from salesrl_trl.names import SERVER_TRACK, SETTINGS_FILE, TRACE_FILE
from salesrl_trl.telemetry.trace import STEPS_TRACK, TraceWriter
from salesrl_trl.timing import Span

GENERATION, PUSH, TRAINING = 2.0, 0.25, 0.75


def run(*seconds, parts=1):
    """A run in each of whose steps rewards take so long, from the generation's end on."""
    rewards = [RewardTime(0.0, own, place * parts // len(seconds)) for place, own in enumerate(seconds)]
    return TracedRun(steps=[TracedStep(GENERATION, PUSH, TRAINING, rewards)], parts=parts, step_s=0.0, waited_s=0.0)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("seconds", [0.0, 4.0, 30.0])
def test_a_step_is_its_work_or_its_share_of_the_slowest_reward(lookahead, seconds):
    step, waited = forecast(run(0.0, seconds), lookahead)
    # a batch is launched at the beginning of a step, which lasts at least as long as its work
    work = GENERATION + PUSH + TRAINING
    expected = max((seconds + work) / (lookahead + 1), work)
    assert step == pytest.approx(expected, rel=0.02)
    assert waited == pytest.approx(expected - work, rel=0.02, abs=0.05)


def test_parts_that_are_in_train_while_others_are_missing():
    assert forecast(run(1.0, 1.0, 5.0, 5.0, parts=2), 0)[0] == pytest.approx(PUSH + GENERATION + 5.0 + TRAINING / 2)
    assert forecast(run(1.0, 1.0, 5.0, 5.0, parts=1), 0)[0] == pytest.approx(PUSH + GENERATION + 5.0 + TRAINING)


def test_slots_make_rewards_wait_for_each_other_and_a_deadline_ends_them():
    assert forecast(run(*[1.0] * 8), 0, slots=2)[0] == pytest.approx(PUSH + GENERATION + 4.0 + TRAINING)
    assert forecast(run(1.0, 9.0), 0, deadline_s=3.0)[0] == pytest.approx(PUSH + GENERATION + 3.0 + TRAINING)


def test_a_server_generates_beside_training_and_takes_weights_when_it_has_answered():
    step, waited = forecast(run(0.0), 1, server=True)
    assert step == pytest.approx(PUSH + max(GENERATION, TRAINING), rel=0.02)
    assert waited == pytest.approx(GENERATION - TRAINING, rel=0.02)


def trace(folder, steps=6, completions=4, waits=("reward_wait",), server=False):
    """A trace as the trainer writes it: two stages of each reward, and batches on two lanes in turns. `waits`: phases
    in place of the wait for rewards."""
    writer, begins = TraceWriter(folder / TRACE_FILE, 10**7, origin=0.0), count(0, 6)
    for number, at in zip(range(1, steps + 1), begins, strict=False):
        ends = {"weight_push": 0.5, "generation": 2, "forward": 3, "reward_wait": 4.5, "logging": 5, "backward": 6}
        phases = zip(ends, [0, *ends.values()], ends.values(), strict=False)
        spans = [Span(name=name, started=at + first, ended=at + last) for name, first, last in phases]
        spans[3:4] = [
            Span(name=name, started=at + 3 + 1.5 * place / len(waits), ended=at + 3 + 1.5 * (place + 1) / len(waits))
            for place, name in enumerate(waits)
        ]
        if server:
            spans.append(Span(name="generation", started=at, ended=at + 2, track=f"{SERVER_TRACK} 1"))
        spans.append(Span(name=f"step {number}", started=at, ended=at + 6, track=STEPS_TRACK))
        for place in range(completions):
            track = f"reward {place}" + " ahead 1" * (number % 2)
            spans.append(Span(name="rag_8b", started=at + 1.5, ended=at + 2, track=track))
            spans.append(Span(name="rag_32b", started=at - 1, ended=at, track=f"{track} reference"))
            spans.append(Span(name="judge", started=at + 2, ended=at + 4 + place, track=track))
        writer.write(0, spans)
    writer.close()


def test_a_trace_is_read_as_it_is_written(tmp_path):
    trace(tmp_path)
    seen = read(tmp_path)
    assert (seen.parts, seen.step_s, seen.waited_s) == (1, pytest.approx(5.5), pytest.approx(1.5))
    for step in seen.steps:
        assert (step.generation, step.push, step.training) == pytest.approx((1.5, 0.5, 2.0))
        assert sorted(reward.seconds for reward in step.rewards) == pytest.approx([2.5, 3.5, 4.5, 5.5])
        assert statistics.mean(reward.after for reward in step.rewards) == pytest.approx(-0.5)


def test_parts_of_a_batch_are_told_by_the_training_between_waits(tmp_path):
    trace(tmp_path, waits=("reward_wait", "backward", "reward_wait"))
    assert read(tmp_path).parts == 2
    trace(tmp_path, waits=("reward_wait", "reward_wait"))  # as with `max_staleness`
    assert read(tmp_path).parts == 1


def test_the_command_says_what_it_found_and_what_is_missing(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "trace_steps" in capsys.readouterr().err
    trace(tmp_path)
    assert main([str(tmp_path), "--lookahead", "0", "3", "--deadline", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("measured over 5 steps: 5.50 s a step, 1.50 s of them waiting")
    assert [line.split(":")[0] for line in lines[2:4]] == ["rollout_lookahead 0", "rollout_lookahead 3"]
    assert lines[4].startswith("25.0% of the completions")
    trace(tmp_path, steps=2)
    assert main([str(tmp_path)]) == 2
    assert "Expected at least 3 steps" in capsys.readouterr().err
    trace(tmp_path, server=True)
    assert main([str(tmp_path)]) == 2
    assert "a run with vLLM's server" in capsys.readouterr().err
    trace(tmp_path)
    for groups, partial, message in (
        (0, 0, ""),
        (2, 0, "that `refill_groups` replaced"),
        (0, 0.5, "`partial_rollouts`"),
    ):
        text = f"max_staleness: 4\nrefill_groups: {groups}\npartial_rollouts: {partial}\n"
        (tmp_path / SETTINGS_FILE).write_text(text)
        assert main([str(tmp_path)]) == (2 if message else 0) and message in capsys.readouterr().err
