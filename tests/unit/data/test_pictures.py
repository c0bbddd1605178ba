"""Pictures of rows: where they lie, what is said about those that are none, and their tokens."""

import io
import json
import struct
import zlib

import pytest
from PIL import Image
from support.seeing import draw, processor, seeing_rows

from salesrl_trl.data.pictures import picture_counter
from salesrl_trl.errors import DataError
from salesrl_trl.launch.data.form import Form
from salesrl_trl.launch.data.prompts import LengthLimit, build_prompt, fit_prompts, token_counter
from salesrl_trl.launch.data.sources import build_dataset, load_rows
from salesrl_trl.rollout.rollout_launcher import prompts_of

TURNS = [{"role": "customer", "content": "How much is it?"}]


@pytest.fixture
def load(tmp_path):
    def write(*values, form=None, column="images"):
        path = tmp_path / "rows.jsonl"
        records = [{"id": "r7", "branch": "tone", "conversation": TURNS, column: value} for value in values]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return load_rows(str(path), "train", ["tone"], form=form or Form())

    return write


def test_paths_start_at_the_data_file(load, tmp_path):
    (tmp_path / "shots").mkdir()
    draw(tmp_path / "one.png", "red")
    draw(tmp_path / "shots" / "two.png", "red")
    many, single, none, absolute = load(["one.png", "shots/two.png"], "one.png", None, [str(tmp_path / "one.png")])
    assert [each.path for each in many.images] == [str(tmp_path / "one.png"), str(tmp_path / "shots" / "two.png")]
    assert single.images == many.images[:1] == absolute.images
    assert none.images == ()
    assert load("one.png", column="image")[0].images == single.images


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["absent.png"], r"row 0 \(counted from 0; id 'r7'\): the picture .*absent\.png does not exist"),
        (["rows.jsonl"], r"id 'r7'\): the picture .*rows\.jsonl can't be read"),
        ([7], r"`images` holds a int"),
    ],
)
def test_a_picture_that_is_missing_or_none_is_named_with_its_row(load, value, message):
    with pytest.raises(DataError, match=message):
        load(value)


def test_a_small_file_that_unpacks_to_absurdly_many_pixels_is_refused(load, tmp_path):
    head = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [head, b"IDAT" + zlib.compress(b"")]
    packed = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    with pytest.raises(
        DataError, match=r"id 'r7'\): the picture .*bomb\.png can't be read \(DecompressionBombError\)"
    ):
        load(["bomb.png"])


def test_the_image_feature_of_datasets_is_read_decoded_or_not(tmp_path):
    image, content = Image.new("RGB", (60, 30), "red"), io.BytesIO()
    image.save(content, "PNG")
    from salesrl_trl.data.pictures import read_pictures, size_of

    for value in (image, {"bytes": content.getvalue(), "path": None}, content.getvalue()):
        [picture] = read_pictures([value], tmp_path, "here")
        assert size_of(picture) == (30, 60)


def test_the_dataset_has_the_pictures_only_if_there_are_some(tmp_path):
    without, one, two, *_ = seeing_rows(tmp_path, ["tone"])
    assert build_dataset([without], "compact").column_names == ["prompt", "row", "branch", "id"]
    dataset = build_dataset([without, one, two], "compact")
    assert [[image.size for image in each] for each in dataset["images"]] == [[], [(84, 56)], [(84, 56), (56, 112)]]
    kinds = [[part["type"] for part in prompt[-1]["content"]] for prompt in prompts_of(list(dataset))]
    assert kinds == [["text"], ["image", "text"], ["image", "image", "text"]]


def test_tokens_of_pictures_are_those_that_the_processor_makes(tmp_path):
    rows = [*seeing_rows(tmp_path, ["tone"])]
    prompts = prompts_of(list(build_dataset(rows, "compact")))
    made = [len(ids) for ids in processor().apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]]  # fmt: skip
    text, pictures = token_counter(processor().tokenizer), picture_counter(processor())
    fitted = fit_prompts(rows, "compact", text, None, "error", "training", pictures)
    assert fitted.lengths == made
    assert made[0] < made[1] < made[2]  # a picture of 84 x 56 pixels is 3 x 2 tokens
    assert pictures(rows[1]) == 6 + 2

    class Untold:
        """Another model's processor, which tells nothing without pixels."""

        apply_chat_template = staticmethod(processor().apply_chat_template)

    assert [picture_counter(Untold())(row) for row in rows] == [pictures(row) for row in rows]


def test_a_prompt_that_is_too_long_with_its_pictures_is_named(tmp_path):
    rows = [*seeing_rows(tmp_path, ["tone"])]
    text, pictures = token_counter(processor().tokenizer), picture_counter(processor())
    alone = text([build_prompt(rows[0], "compact")])[0]
    limit = LengthLimit(tokens=alone + pictures(rows[1]), reason="as many as row 1 has")
    with pytest.raises(DataError, match=r"3 of 5 training rows .*row 2 \(\d+ tokens\), row 3"):
        fit_prompts(rows, "compact", text, limit, "error", "training", pictures)
    kept = fit_prompts(rows, "compact", text, limit, "drop", "training", pictures)
    assert kept.rows == rows[:2]
