"""scripts/supervise.sh with small commands in place of a training: what is started again, and what is final."""

import os
import re
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
QUICK = ("--backoff", "0.01")
RESUMES = ("--resume_from_checkpoint", "auto")
PATIENCE_S = 20.0


def command(folder, body, *options, resumes=RESUMES):
    """supervise.sh around a shell that writes a line to `attempts`, then does `body`; `$n` counts from 1."""
    counting = f'cd "{folder}"; echo begun >> attempts; n=$(wc -l < attempts); {body}'
    return [str(SCRIPTS / "supervise.sh"), *options, "--", "bash", "-c", counting, "training", *resumes]


def run(folder, body, *options, **given):
    """(exit code, attempts, lines on stderr)."""
    ended = subprocess.run(
        command(folder, body, *options, **given), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return ended.returncode, attempts(folder), ended.stderr


def attempts(folder):
    return (folder / "attempts").read_text().count("begun") if (folder / "attempts").exists() else 0


@contextmanager
def started(folder, body, *options):
    """Under way, after the first line of the command's own, and in a process group of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(folder, body, *options), **pipes, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_it_starts_again_until_the_run_has_finished_and_each_wait_is_longer(tmp_path):
    ends = 'case $n in 1) exit 75;; 2) kill -KILL $$;; 3) kill -SEGV $$;; 4) exit 134;; esac; test "$*" = "{}"'
    options = ("--backoff", "0.01", "--max-backoff", "0.03")
    code, number, told = run(tmp_path, ends.format(" ".join(RESUMES)), *options)
    assert (code, number) == (0, 5)
    lines = re.findall(r"supervise: restart (\d) of 5 in ([\d.]+) s: exit code (\d+) \((.*)\), after \d s", told)
    assert lines == [
        ("1", "0.010", "75", "it stopped and can be resumed"),
        ("2", "0.020", "137", "SIGKILL ended it"),
        ("3", "0.030", "139", "SIGSEGV ended it"),
        ("4", "0.030", "134", "SIGABRT ended it"),
    ]
    assert told.endswith("supervise: the run has finished\n")


@pytest.mark.parametrize("code", [1, 127, 130, 143])
def test_a_final_exit_code_is_passed_on(tmp_path, code):
    assert run(tmp_path, f"exit {code}", *QUICK)[:2] == (code, 1)


def test_the_code_that_the_run_has_written_counts_not_that_of_its_launcher(tmp_path):
    writes = 'case $n in 1) code=75;; 2) code=137;; *) code=3;; esac; echo $code > "$SALESRL_TRL_LAUNCH/first"; exit 1'
    code, number, told = run(tmp_path, writes, *QUICK)
    assert (code, number) == (3, 3)
    assert "exit code 75 (it stopped and can be resumed)" in told
    assert "exit code 137 (SIGKILL ended it)" in told


def test_it_gives_up_without_progress_by_a_code_that_no_scheduler_takes_for_resumable(tmp_path):
    code, number, told = run(tmp_path, "exit 75", *QUICK, "--max-restarts", "2")
    assert (code, number) == (3, 3)
    assert "giving up: exit code 75 (it stopped and can be resumed), after 2 restarts in a row" in told


def test_an_attempt_that_lasted_long_enough_makes_the_count_begin_anew(tmp_path):
    body = "test $n -lt 4 && exit 75; exit 2"
    code, number, told = run(tmp_path, body, *QUICK, "--max-restarts", "1", "--healthy-after", "0")
    assert (code, number) == (2, 4)
    assert told.count("restart 1 of 1 in 0.010 s") == 3


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("came", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_the_training_behind_the_launcher_and_nothing_is_started_again(tmp_path, came):
    # As with accelerate: the launcher passes no signal on, and SIGTERM ends it before the training has saved.
    saves = "trap 'echo {0} >> got; sleep 0.2; echo saved >> got; exit' {0}"
    training = "; ".join(map(saves.format, ("INT", "TERM")))
    launcher = "trap 'exit 75' INT TERM; (" + training + "; echo ready; while :; do sleep 0.02; done) & wait; exit 75"
    with started(tmp_path, launcher, *QUICK) as process:
        os.killpg(process.pid, came)  # as a terminal does for Ctrl-C: the training gets it once all the same
        assert process.wait(PATIENCE_S) == 75
        told = process.stderr.read()
    got = (tmp_path / "got").read_text().split()
    assert got == ["INT" if came is signal.SIGINT else "TERM", "saved"]
    assert attempts(tmp_path) == 1
    assert told.endswith(f"supervise: exiting with the run's exit code 75 after {came.name}\n")


def test_a_signal_between_two_attempts_ends_it_at_once(tmp_path):
    with started(tmp_path, "echo ready; exit 75", "--backoff", "60") as process:
        assert "restart 1 of 5 in 60.000 s" in process.stderr.readline()
        process.terminate()
        assert process.wait(PATIENCE_S) == 75
    assert attempts(tmp_path) == 1


def test_what_is_left_of_an_attempt_has_ended_before_the_next_one_begins(tmp_path):
    left = "(trap 'sleep 0.2; echo saved >> attempts; exit' TERM; echo > left; while :; do sleep 0.02; done) &"
    body = f"test $n -gt 1 && exit 0; {left} while ! test -e left; do sleep 0.02; done; kill -KILL $$"
    code, number, told = run(tmp_path, body, *QUICK)
    assert (code, number) == (0, 2)
    assert (tmp_path / "attempts").read_text().split() == ["begun", "saved", "begun"]
    assert "the first process ended (exit code 137) before the others" in told


@pytest.mark.parametrize(
    ("options", "resumes", "message"),
    [
        ((), (), "has no --resume_from_checkpoint, so each restart would start from scratch"),
        ((), (*RESUMES, "--resume_from_checkpoint", "false"), "each restart would begin at that step again"),
        ((), (*RESUMES, "--resume_from_checkpoint=runs/a/checkpoint-8"), "would begin at that step again"),
        (("--backoff", "soon"), RESUMES, "--backoff is 'soon'. Expected seconds."),
        (("--max-restarts", "1.5"), RESUMES, "--max-restarts is '1.5'. Expected a whole number."),
        (("--tries", "1"), RESUMES, "unknown argument '--tries'"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_started(tmp_path, options, resumes, message):
    code, number, told = run(tmp_path, "exit 0", *options, resumes=resumes)
    assert (code, number) == (2, 0)
    assert message in told


@pytest.mark.parametrize(
    ("machines", "config", "launched"),
    [
        (1, {}, "launch recipes/full.py"),
        (1, {"CONFIG": "fsdp2.yaml"}, "launch --config_file fsdp2.yaml recipes/full.py"),
        (2, {"CONFIG": "fsdp2.yaml"}, "launch --machine_rank 1 --config_file fsdp2.yaml --num_machines 2 "
         "--main_process_port 29511 --deepspeed_multinode_launcher standard --num_processes 16 --main_process_ip a1 "
         "recipes/full.py"),
    ],
)  # fmt: skip
def test_slurm_starts_a_process_group_on_every_machine_with_the_chosen_configuration(
    tmp_path, machines, config, launched
):
    """With stand-ins for accelerate, srun and scontrol."""
    for name, body in {
        "accelerate": 'echo "$@"',
        "srun": 'shift; SLURM_NODEID=1 exec "$@"',
        "scontrol": "echo a1; echo a2",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts").symlink_to(SCRIPTS)
    job = SCRIPTS / "supervise.slurm"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_NNODES": str(machines),
                 "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_GPUS_ON_NODE": "8"} | config  # fmt: skip
    done = subprocess.check_output(["bash", job], cwd=tmp_path, env=variables, text=True, timeout=PATIENCE_S)
    assert done == f"{launched} --resume_from_checkpoint auto\n"
    # sbatch puts a job of one task on one machine, whatever --nodes is
    header = [line.split()[1] for line in job.read_text("utf-8").splitlines() if line.startswith("#SBATCH")]
    assert [each for each in header if each.startswith("--ntasks")] == ["--ntasks-per-node=1"]


def test_the_job_of_slurm_is_queued_again_when_its_time_is_over_and_only_then(tmp_path):
    """With stand-ins for accelerate and scontrol, and the real supervise.sh."""
    for name, body in {
        "accelerate": "trap 'exit 75' TERM; echo begun >> attempts; echo ready; while :; do sleep 0.02; done",
        "scontrol": 'echo "$@" >> queued',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts").symlink_to(SCRIPTS)  # the job is submitted from a checkout
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    for came in (signal.SIGTERM, signal.SIGUSR1):
        job = ["bash", str(SCRIPTS / "supervise.slurm")]
        with subprocess.Popen(job, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            assert not (tmp_path / "queued").exists()
            process.send_signal(came)
            assert process.wait(PATIENCE_S) == 75
    assert (tmp_path / "queued").read_text() == "requeue 42\n"
    assert attempts(tmp_path) == 2
