#!/usr/bin/env python3
"""The demo with pictures: the customer sends a screenshot of a price list, and asks about the course marked in it.

Each row is an English conversation of the demo, in which a drawn picture takes the place of the course's name.
Questions, documents and draft actions stay the demo's, so that its services can score the answers.

    .venv/bin/python scripts/demo_pictures.py [FOLDER]

It writes the dataset as a user would give one of their own. `dataset: demo_pictures` reads it in its default folder.
"""

import argparse
import colorsys
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from salesrl_trl.data.files import DEMO_PICTURES_FOLDER, FILES, Record, demo_records

WIDTH, BAND = 224, 28  # pixels: the width of a picture, and the height of each of its lines
COURSES = 3  # courses on a price list. One of them is marked, in a colour that the course has on every list.
FONT_SIZES = (12, 13)
MISREAD = 0.35  # share of the draft actions whose annotator took another course of the list
MARKED = "the course marked in my screenshot"  # what the customer says in place of the course's name
SEED = 0

_PAPER = ((255, 255, 255), (250, 248, 240), (240, 244, 250))
_TITLES = ("Evening school", "Course prices", "Price list")


def write_dataset(folder: Path) -> None:
    documents = {document["id"]: document for document in demo_records("knowledge.jsonl")}
    drafts = {draft["id"]: draft["draft_actions"] for draft in demo_records("drafts.jsonl")}
    names, prices = {}, {}
    for document in documents.values():
        if (document["lang"], document["kind"], document.get("topic")) != ("en", "course", "price"):
            continue
        course = document["course"]
        names[course] = document["title"].removesuffix(" price")
        prices[course] = int(re.findall(r"(\d+) yuan", document["text"])[0])
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for file in FILES.values():
        lines = []
        for record in demo_records(file):
            if record["lang"] != "en":  # Pillow's own font has no Chinese characters
                continue
            chance = random.Random(f"{SEED} {record['id']}")
            shown = chance.sample([course for course in sorted(names) if course != record["course"]], COURSES - 1)
            marked = chance.randrange(COURSES)
            shown.insert(marked, record["course"])
            picture = f"images/{record['id']}.png"
            hue = sorted(names).index(record["course"]) / len(names)  # light colours, as different as can be
            colour = tuple(round(255 * part) for part in colorsys.hls_to_rgb(hue, 0.7, 0.8))
            listed = [(names[course], prices[course]) for course in shown]
            draw_price_list(listed, marked, colour, chance).save(folder / picture)
            others = [names[course] for place, course in enumerate(shown) if place != marked]
            name = names[record["course"]]
            made = {"draft_actions": _drafts(drafts.get(record["id"], ()), name, others, chance)}
            lines.append(_row(record, picture, name, documents) | made)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / file).write_text(text, encoding="utf-8")


def draw_price_list(
    courses: Sequence[tuple[str, int]], marked: int, colour: tuple[int, ...], chance: random.Random
) -> Image.Image:
    """A screenshot of a price list: a line for its title, and one for each course with its price in yuan. The course
    number `marked` has the background `colour`. `chance` decides the paper, size and place of the letters."""
    paper, title = chance.choice(_PAPER), chance.choice(_TITLES)
    image = Image.new("RGB", (WIDTH, BAND * (len(courses) + 1)), paper)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(chance.choice(FONT_SIZES))
    left, down = chance.randint(4, 12), chance.randint(4, 9)
    draw.text((left, down), title, fill=(90, 90, 90), font=font)
    for place, (name, price) in enumerate(courses, start=1):
        top = place * BAND
        if place - 1 == marked:
            draw.rectangle((0, top + 1, WIDTH, top + BAND - 2), fill=colour)
        draw.text((left, top + down), name, fill=(0, 0, 0), font=font)
        draw.text((WIDTH - 8, top + down), str(price), fill=(0, 0, 0), font=font, anchor="ra")
    return image


def _row(record: Record, picture: str, name: str, documents: Mapping[str, Record]) -> Record:
    said = re.compile(rf"the {re.escape(name)} course", re.IGNORECASE)
    columns = ("id", "branch", "tenant_id", "contact_id", "account_id", "message_id", "topic", "course")
    turns = [{**turn, "content": said.sub(MARKED, turn["content"])} for turn in record["conversation"]]
    return {
        **{key: record[key] for key in columns},
        "course_name": _lower(name),
        "conversation": turns,
        "images": [picture],
        "documents": [documents[id_]["text"] for id_ in record["document_ids"]],
    }


def _drafts(
    drafts: Sequence[Mapping[str, str]], name: str, others: Sequence[str], chance: random.Random
) -> list[dict[str, str]]:
    """Draft actions for the row. Profile and summary name no course: the judge reads text alone."""
    said, made = re.compile(re.escape(name), re.IGNORECASE), []
    for draft in drafts:
        read = chance.choice(others) if chance.random() < MISREAD else name
        made.append({
            field: said.sub(_lower(read) if field == "rewritten_query" else "the marked course", text)
            for field, text in draft.items()
        })  # fmt: skip
    return made


def _lower(name: str) -> str:
    """The name inside a sentence: `"acoustic guitar"`, and `"IELTS speaking"` as it is."""
    return name if name[:2].isupper() or name.startswith(("Japanese", "Python")) else name[0].lower() + name[1:]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_PICTURES_FOLDER)
    write_dataset(parser.parse_args().folder)


if __name__ == "__main__":
    _main()
