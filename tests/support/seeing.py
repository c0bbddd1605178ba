"""A policy of random weights that reads pictures, and rows for it."""

import functools

import make_vision_policy as vision
import torch
from PIL import Image

from salesrl_trl.types import Message, Picture, SalesRow


@functools.cache
def processor():
    return vision.build_processor()


def make_seeing_policy(path):
    torch.manual_seed(0)
    vision.build_model(processor().tokenizer).save_pretrained(path)
    processor().save_pretrained(path)
    return path


def draw(path, colour, size=(84, 56)):
    """A file of one colour, `size` being width and height."""
    Image.new("RGB", size, colour).save(path)
    return Picture(path=str(path))


def seeing_rows(folder, branches):
    """A row of each branch without a picture, with one, and with two of different sizes."""
    red, blue = draw(folder / "red.png", "red"), draw(folder / "blue.png", "blue", (56, 112))
    turns = (Message(role="customer", content="What does the course in my screenshot cost?"),)
    return [
        SalesRow(row_id=f"{branch}-{len(images)}", branch=branch, conversation=turns, images=images)
        for images in ((), (red,), (red, blue), (blue,), (blue, blue))
        for branch in branches
    ]
