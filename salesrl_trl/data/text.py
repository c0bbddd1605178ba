"""Messages about a user's text file that can't be read."""


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """The error in words, such as `"line 3, byte 17 (0xe9) is not UTF-8: ..."`."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    before = error.object[: error.start]
    line, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
    value = error.object[error.start]
    return f"line {line}, byte {byte} (0x{value:02x}) is not UTF-8: is it Latin-1 or GBK? Save the file as UTF-8"
