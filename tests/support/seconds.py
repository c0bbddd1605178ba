"""Bounds on real seconds."""

import time


class TookTooLong(AssertionError):
    """The code was too slow, or the machine busy. A test that ends so is run again, twice at most (`conftest.py`)."""


def check_seconds(seconds, most, least=0.0, what="it took"):
    """Assert that `seconds` lie between `least` and `most`."""
    assert seconds >= least, what
    if seconds > most:
        raise TookTooLong(f"{what}: {seconds:.3f} s, expected at most {most:g} s")


def until(holds):
    """Wait until `holds()`, for 30 s at most."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
