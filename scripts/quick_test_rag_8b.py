#!/usr/bin/env python3
"""Asks the RAG service's 8B endpoint one question. Prints the status, the seconds, the passages and the answer.

    python3 scripts/quick_test_rag_8b.py --base-url http://127.0.0.1:8801 --query "Python data analysis price"

`test_rag_endpoints.py` checks more: it says why a connection fails, and holds the answer against the contract. This
tool needs the standard library of any Python from 3.9 on and nothing else. It uses no proxy, follows no redirect and
retries nothing. Exit code: 0 answered; 1 not answered; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import sys
import threading
import time
from typing import Any
from urllib.parse import SplitResult, urlsplit

MAX_BODY_BYTES = 4 * 1024 * 1024


def main() -> int:
    options = parsed()
    sys.stdout.reconfigure(errors="backslashreplace")
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    started = time.perf_counter()
    # In a thread: the timeout holds for the whole request, also when its bytes come one by one.
    threading.Thread(target=lambda: results.put(ask(options)), daemon=True).start()
    try:
        status, content = results.get(timeout=options.timeout)
    except queue.Empty:
        status, content = "no complete answer", b""
    print(f"POST {options.base_url.geturl()}/v1/rag/8b: {status} in {time.perf_counter() - started:.3f} s")
    if status != 200:
        print("expected 200; test_rag_endpoints.py says more about the cause")
        return 1
    try:
        print(*shown(json.loads(content), options.key), sep="\n")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        print("got another body than {answer, passages: [{id, text, score}], took_ms}; see test_rag_endpoints.py")
        return 1
    return 0


def ask(options: argparse.Namespace) -> tuple[int | str, bytes]:
    """The status and the body. The name of an error instead of the status, if there was one."""
    place: SplitResult = options.base_url
    body = dict.fromkeys(("tenant_id", "contact_id", "account_id", "message_id"), "")
    body.update(context=options.context or f"customer: {options.query}", user_profile=options.profile)
    body.update(rewritten_query=options.query, history_summary=options.summary)
    limits = {"score_threshold": options.score_threshold, "top_k": options.top_k}
    headers = {"Content-Type": "application/json"}
    headers.update({"Authorization": f"Bearer {options.key}"} if options.key else {})
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname, place.port, timeout=options.timeout)
    try:
        connection.request("POST", f"{place.path}/v1/rag/8b", json.dumps({**body, **limits}), headers)
        response = connection.getresponse()
        return response.status, response.read(MAX_BODY_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return type(error).__name__, b""
    finally:
        connection.close()


def shown(body: Any, key: str | None) -> list[str]:
    """The passages and the answer, without the key and without control characters."""
    lines = [f"{len(body['passages'])} passages, took_ms {float(body['took_ms']):.1f}"]
    lines += [f"  {float(each['score']):.3f}  {each['id']}" for each in body["passages"]]
    lines += body["answer"].splitlines()
    shielded = (line.replace(key, "<key>") if key else line for line in lines)
    return ["".join(each if each.isprintable() else " " for each in line) for line in shielded]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", type=address, required=True, help="the service's address before /v1/rag")
    parser.add_argument("--key-env", help="environment variable that holds the key")
    parser.add_argument("--query", default="How much does the beginner course cost?", help="the customer's question")
    parser.add_argument("--profile", default="office worker, free in the evenings", help="the customer's profile")
    parser.add_argument("--summary", default="asked about courses", help="what was said before")
    parser.add_argument("--context", help="the conversation; default: the query, asked by the customer")
    parser.add_argument("--top-k", type=int, default=3, help="most passages in the answer")
    parser.add_argument("--score-threshold", type=float, default=0.03, help="lowest score of a passage")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for the whole request")
    options = parser.parse_args()
    options.key = os.environ.get(options.key_env, "") if options.key_env is not None else None
    if options.key == "":
        parser.error("--key-env: the variable is not set, expected the name of one that holds the key; export it")
    if not 0 < options.timeout <= 3600:
        parser.error(f"--timeout: got {options.timeout:g}, expected above 0 and at most 3600 seconds")
    return options


def address(text: str) -> SplitResult:
    """The parts of a base URL. The message of a refused one does not show it: it may hold a password."""
    if not text.startswith(("http://", "https://")) or "@" in text or "?" in text:
        raise argparse.ArgumentTypeError("expected an address such as https://rag.example.com, without user and query")
    return urlsplit(text.rstrip("/"))


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        code = 130
    except OSError as error:  # of stdout: that of the connection is a result
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's last flush fails again
        print(f"the output can't be written ({error.strerror})", file=sys.stderr)
        code = 2
    sys.exit(code)
