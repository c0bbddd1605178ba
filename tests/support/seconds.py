"""Bounds on how long something takes."""


class TookTooLong(AssertionError):
    """It, or the machine: what else a machine does only adds. A test that ends so is run again, twice at most
    (`conftest.py`), and passes if one of them was in time."""


def check_seconds(seconds, most, least=0.0, what="it took"):
    """Between `least` and `most`, in seconds."""
    assert seconds >= least, what
    if seconds > most:
        raise TookTooLong(f"{what}: {seconds:.3f} s, expected at most {most:g} s")
