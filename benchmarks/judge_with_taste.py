"""A judge with a taste for a word, to see what the judge's meter does in a run of the demo.

    python -m benchmarks.judge_with_taste PORT [WORD]

It is the embedded judge. With WORD it gives 0.6 of that one's score, and 0.4 for an action that has the word.
"""

import argparse
from dataclasses import replace

import uvicorn
from fastapi import FastAPI

from salesrl_trl.demo.services import services_app
from salesrl_trl.demo.services.rubric import judge_sections, protected_terms

SHARE = 0.4  # of the score, that the word has


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("word", nargs="?")
    args = parser.parse_args()

    def judged(sections, terms):
        verdict = judge_sections(sections, terms)
        has_it = args.word in sections.get("action", "").lower()
        return replace(verdict, candidate=(1 - SHARE) * verdict.candidate + SHARE * has_it)

    if args.word:
        services_app.judge_sections = judged
    app = FastAPI()
    services_app.serve_judge(app, protected_terms())
    uvicorn.run(app, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
