"""The reward function of `own.yaml`, an example for your own."""


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 for the right answer, else 0. `answer` is a column of the rows."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [float(text == expected) for text, expected in zip(texts, answer, strict=True)]
