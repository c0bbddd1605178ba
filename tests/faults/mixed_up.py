"""A loopback RAG service and judge that mix up their replies. Every number is a function of its item or row (`truth`).
A share of the replies, `share`, has one of `FAULTS` each. `GET /_stats` returns how many of each there were."""

import asyncio
import json
import random
import re
import sys
from collections import Counter, deque

from faults.fault_server import chat, nonce_of, response, serve

BY_BYTES = ("duplicate", "in_parts", "doubled_body", "doubled_length", "echo")
"""Faults that the client always recognises by the bytes of a connection and the form of a reply."""
FAULTS = (*BY_BYTES, "duplicate_later", "stray_later", "stray_first", "stale", "swap")
"""Also those that it recognises only by a nonce or an id. For `..._later` this holds if the next request was sent
before."""
LATER_S = 0.01
SWAP_PATIENCE_S = 0.2


def truth(kind, number):
    """The true number of an item or a row: in [0, 1], different for each."""
    return round(random.Random(f"{kind} {number}").random(), 9)


def number_in(name, text):
    return int(re.search(rf"{name}-(\d+)", text)[1])


def rag_answer(path, asked):
    """An answer names its item or row. The score of its passage is the true number of that item or row."""
    name, kind, text = ("item", "passage", asked["rewritten_query"]) if "8b" in path else ("row", "", asked["context"])
    number = number_in(name, text)
    passages = [{"id": f"d{number}", "text": "...", "score": truth(kind, number)}]
    return {"answer": f"All about {name}-{number}.", "passages": passages, "took_ms": 1.0}


def verdict(asked):
    """The scores are the true numbers of the item and the row that the answers name. The action does not count."""
    system, user = (message["content"] for message in asked["messages"])
    shown = dict(re.findall(r"^<<<(\w+_answer) \w+>>>\n(.*?)\n<<<end", user, re.MULTILINE | re.DOTALL))
    reference = shown.get("reference_answer")
    said = {
        "candidate": truth("candidate", number_in("item", shown["candidate_answer"])),
        "reference": None if reference is None else truth("reference", number_in("row", reference)),
        "reason": "",
    }
    return {"nonce": nonce_of(user.encode()), **said} if '"nonce"' in system else said


class MixedUp:
    """Serves requests of `Connection`."""

    def __init__(self, share, faults=FAULTS, returns_ids=True, **_):
        self.share, self.faults, self.returns_ids = share, faults, returns_ids
        self.stats = Counter()
        self.random = random.Random(0)
        self.said = {}  # path: its latest replies
        self.waiting = {}  # path: (transport, reply) that waits for another one to swap with

    async def serve(self, path, transport, body):
        reply = self.reply(path, json.loads(body))
        earlier = self.said.setdefault(path, deque([reply], maxlen=100))
        fault = self.random.choice(self.faults) if self.random.random() < self.share else "none"
        self.stats[fault] += 1
        other = self.random.choice(earlier)
        earlier.append(reply)
        content = reply.partition(b"\r\n\r\n")[2]
        parts = {
            "none": [reply],
            "duplicate": [reply + reply],
            "duplicate_later": [reply, reply],
            "stray_later": [reply, other],
            "stray_first": [other, reply],
            "stale": [other],
            "in_parts": [reply + other[:40], other[40:]],
            "doubled_body": [reply + content],
            "doubled_length": [response(200, content + content)],
            "echo": [response(200, chat(body.decode()) if self.random.random() < 0.5 else body)],
        }
        if fault == "swap":
            await self.swap(path, transport, reply)
            return
        first, *rest = parts[fault]
        transport.write(first)
        for part in rest:
            await asyncio.sleep(0 if fault == "stray_first" else LATER_S)
            transport.write(part)

    async def swap(self, path, transport, reply):
        """Two requests get each other's reply. If no other request comes soon, a request gets its own."""
        waiting = self.waiting.pop(path, None)
        if waiting is not None:
            waiting[0].write(reply)
            transport.write(waiting[1])
            return
        self.waiting[path] = (transport, reply)
        await asyncio.sleep(SWAP_PATIENCE_S)
        if self.waiting.get(path) == (transport, reply):
            del self.waiting[path]
            transport.write(reply)

    def reply(self, path, asked):
        if path.endswith("/chat/completions"):
            return response(200, chat(json.dumps(verdict(asked))))
        answer, request_id = rag_answer(path, asked), asked.get("request_id")
        if request_id is None or not self.returns_ids:
            return response(200, answer)
        return response(200, {**answer, "request_id": request_id}, X_Request_Id=request_id)


if __name__ == "__main__":
    asyncio.run(serve(MixedUp(**json.loads(sys.argv[1]))))
