"""Make docs/TROUBLESHOOTING.md from the catalogue of faults.

    python scripts/make_troubleshooting.py

tests/unit/run/test_last_words.py holds the page and the catalogue in step.
"""

from pathlib import Path

from salesrl_trl.launch.process import FAULTS, PAGE, Sign


def page() -> str:
    """The text of the page, by title."""
    ordered = sorted(FAULTS, key=lambda fault: fault.title)
    parts = [
        "# Troubleshooting",
        "A run that fails ends with its last words: the error, its cause, and what to do, in this order. They are the "
        "last lines of the console, and stand in `OUTPUT_DIR/run.log`. This page holds all that are known. It is made "
        "by `python scripts/make_troubleshooting.py`, from the table by which a run recognises them.",
        "For a run that hangs: the last `[Heartbeat]` line names the phase ([TIMING.md](TIMING.md)).",
        "\n".join(f"- [{fault.title}](#{fault.anchor})" for fault in ordered),
    ]
    for fault in ordered:
        steps = "\n".join(f"{number}. {step}" for number, step in enumerate(fault.remedies, 1))
        parts += [f"## {fault.title}", fault.cause, f"Recognised by: {'; '.join(map(_shown, fault.signs))}.", steps]
    return "\n\n".join(parts) + "\n"


def _shown(sign: Sign) -> str:
    parts = {"error": sign.kind, "message": sign.text, "raised in": sign.where, "signal": sign.status}
    return ", ".join(f"{name} `{value}`" for name, value in parts.items() if value)


if __name__ == "__main__":
    (Path(__file__).resolve().parents[1] / PAGE).write_text(page(), "utf-8")
