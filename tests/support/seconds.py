"""Bounds on real seconds, and waiting."""

import time

import psutil


class TookTooLong(AssertionError):
    """The code was too slow, or the machine busy. A test that ends so is run again, twice at most (`conftest.py`)."""


def check_seconds(seconds, most, least=0.0, what="it took"):
    """Assert that `seconds` lie between `least` and `most`."""
    assert seconds >= least, what
    if seconds > most:
        raise TookTooLong(f"{what}: {seconds:.3f} s, expected at most {most:g} s")


def is_gone(pid):
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(holds):
    """Wait until `holds()`, for 30 s at most."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
