"""A RAG service over embeddings, for `rag.base_url: http://127.0.0.1:8801`. It answers with the closest document.

`OPENAI_BASE_URL` and `OPENAI_API_KEY` point to the embedding model. The service embeds all documents when it starts.
"""

import json
import os
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI, OpenAI

MODEL = os.environ.get("EMBEDDING_MODEL", "bge-m3")
DOCUMENTS = os.environ.get("DOCUMENTS", str(files("salesrl_trl.demo.rows") / "knowledge.jsonl"))
MOST_CHARS = 6_000  # fits the 8,192 tokens of common models, also in Chinese
documents = [json.loads(line) for line in Path(DOCUMENTS).read_text("utf-8").splitlines() if line.strip()]
tenants = np.array([document.get("tenant_id") or "" for document in documents])  # empty: visible to all tenants
client = AsyncOpenAI(max_retries=0)  # the run does the retries
app = FastAPI()


def directions(reply):
    vectors = np.array([entry.embedding for entry in sorted(reply.data, key=lambda entry: entry.index)])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


texts = [f"{document.get('title', '')}\n{document['text']}" for document in documents]
parts = [texts[at : at + 64] for at in range(0, len(texts), 64)]
stored = np.concatenate([directions(OpenAI().embeddings.create(model=MODEL, input=part)) for part in parts])


@app.post("/v1/rag/{endpoint}")
async def answer(endpoint: str, asked: dict):
    """`8b` searches with the action, with its query weighted threefold; `32b` with the end of the conversation."""
    started = time.perf_counter()
    action = [asked.get("rewritten_query")] * 3 + [asked.get("user_profile"), asked.get("history_summary")]
    text = "\n".join(filter(None, action))[:MOST_CHARS] if endpoint == "8b" else asked["context"][-MOST_CHARS:]
    query = directions(await client.embeddings.create(model=MODEL, input=[text]))[0]
    allowed = np.isin(tenants, ["", asked["tenant_id"]]) if asked.get("tenant_id") else True
    scores = np.where(allowed, (stored @ query).clip(0.0, 1.0), -1.0)  # cosines
    best = [at for at in np.argsort(-scores)[: asked["top_k"]] if scores[at] >= asked["score_threshold"]]
    passages = [{"id": documents[at]["id"], "text": documents[at]["text"], "score": float(scores[at])} for at in best]
    found = passages[0]["text"] if passages else "I'm sorry, I found nothing about this."
    figures = {"took_ms": 1e3 * (time.perf_counter() - started), "request_id": asked["request_id"]}
    return {"answer": found, "passages": passages, **figures}


uvicorn.run(app, port=int(os.environ.get("PORT", "8801")), log_level="warning")
