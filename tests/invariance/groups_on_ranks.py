"""Train keyed samples on every rank, whose groups are judged together in a process of the reward's own. Started with
several processes: POLICY URL OUT SETTINGS, which are JSON. Each rank writes what happened, and what was recorded."""

import json
import os
import sys
from pathlib import Path

from support.keyed import build_keyed, course_of

from salesrl_trl.reward.remote import RemoteReward


def main(policy, url, out, settings):
    rank, given = os.environ["RANK"], json.loads(settings)
    trainer = build_keyed(policy, url, Path(out, "run"), judging={"orders": 2}, place=RemoteReward, **given)
    Path(out, f"rank{rank}.json").write_text(json.dumps(course_of(trainer)))


if __name__ == "__main__":
    main(*sys.argv[1:])
