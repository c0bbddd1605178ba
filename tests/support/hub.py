"""A hub on this machine: it keeps what is pushed, by commit, as the real one's API takes it."""

import base64
import json
import re
from dataclasses import dataclass, field

from werkzeug import Request, Response


@dataclass
class Hub:
    repositories: dict[str, bool] = field(default_factory=dict)  # whether each is private
    commits: list[dict[str, bytes]] = field(default_factory=list)

    @property
    def files(self):
        """Names of all files that have arrived."""
        return sorted({name for commit in self.commits for name in commit})

    def answer(self, request: Request) -> Response:
        at, said = request.path, request.get_data()
        if at == "/api/repos/create":
            asked = json.loads(said)
            name = f"me/{asked['name']}"
            self.repositories[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return _json({"url": f"{request.host_url}{name}"})
        if at == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if "/preupload/" in at:
            files = json.loads(said)["files"]
            modes = {"uploadMode": "regular", "shouldIgnore": False}  # each in one request, without LFS
            return _json({"files": [{"path": file["path"], **modes} for file in files]})
        if "/commit/" in at:
            lines = [json.loads(line) for line in said.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            oid = f"{len(self.commits):040x}"
            return _json({"commitUrl": f"{request.host_url}me/policy/commit/{oid}", "commitOid": oid})
        return Response(status=404)


def _json(value):
    return Response(json.dumps(value), content_type="application/json")


def open_hub(monkeypatch, httpserver):
    """The hub, in place of the real one for this process."""
    hub = Hub()
    httpserver.expect_request(re.compile(".*")).respond_with_handler(hub.answer)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", httpserver.url_for("").rstrip("/"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    return hub
