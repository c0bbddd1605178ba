#!/usr/bin/env python3
"""Check whether a RAG service is ready for training: connectivity, response format and latency.

    python scripts/test_rag_endpoints.py --base-url https://rag.example.com --key-env RAG_KEY
    python scripts/test_rag_endpoints.py --base-url http://127.0.0.1:8801 --quick --query "Python data analysis price"

It resolves the host, connects, and shows the certificate. Then it runs the preflight's stage `rag` with training's
client and the demo's questions, and suggests settings. With --quick, it asks the 8B endpoint one question, and
prints the passages and the answer. It prints no other answers and no keys, and retries nothing. Accepts every recipe
setting, e.g. `--rag.timeout_s 60`. Doesn't import torch.

Exit code: 0 ready; 1 not ready, with the reasons; 2 wrong usage; 130 interrupted.
"""

import argparse
import asyncio
import dataclasses
import math
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from salesrl_trl.ground.command_line import ToolParser, ended, strict_json
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.launch.assembly import ServiceClients
from salesrl_trl.launch.checks.outcome import Figure, Finding, Findings, StageVerdict
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.preflight.services import RAG_STAGE, under_load
from salesrl_trl.launch.preflight.stage import PreflightStage, StageReport, report_of, stage_text
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.launch.services_plan import ServicesConfig, ServicesPlan, StepSettings
from salesrl_trl.launch.settings import parse_part
from salesrl_trl.types import Action, RequestIds

if TYPE_CHECKING:
    from salesrl_trl.launch.plan import Plan

EXIT_NOT_READY = 1
CONNECTION_S = 10.0  # for each of DNS, TCP and TLS: a cold load balancer needs less
EXPIRY_WARNING_DAYS = 14  # a certificate that expires sooner may expire during a run
TIMEOUT_MARGIN, MIN_TIMEOUT_S = 3, 5  # `rag.timeout_s` of so many times the slower p95, and no less
ADVICE = {
    "DNS": "A typo in the name, or a name that resolves only in another network or a VPN. Try `getent hosts {host}`.",
    "TCP": "Refused: nothing listens on that port, or only on its own machine's loopback. Timed out: a firewall or a "
    "VPN. Try `nc -vz {host} {port}` from another machine.",
    "TLS": "If the port speaks plain http, use http:// in the address. The certificate must be valid for this host. "
    "For a private CA, add it to the system's store, or set SSL_CERT_FILE, for training too.",
}


def connection(url: str) -> Iterator[StageReport]:
    """The stages DNS, TCP and, for https, TLS, each when it is over. The first that fails ends them."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    stage, start = "DNS", time.perf_counter()

    def report(figures: dict[str, Figure], *findings: Finding) -> StageReport:
        verdict = Findings([*findings]).verdict
        return StageReport(stage, verdict, time.perf_counter() - start, findings, figures)

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        yield report({"addresses": " ".join(dict.fromkeys(str(entry[4][0]) for entry in found))})
        stage, start = "TCP", time.perf_counter()
        with socket.create_connection((host, port), CONNECTION_S) as plain:
            yield report({"address": str(plain.getpeername()[0])})
            if parts.scheme != "https":
                return
            stage, start = "TLS", time.perf_counter()
            with ssl.create_default_context().wrap_socket(plain, server_hostname=host) as secure:
                certificate = cast("dict[str, str]", secure.getpeercert())
                days = math.floor((ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86_400)
                soon = [Finding(f"The certificate expires in {days} days.")] if days < EXPIRY_WARNING_DAYS else []
                yield report({"version": secure.version(), "expires": certificate["notAfter"]}, *soon)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or type(error).__name__
        yield report({}, Finding(f"{reason}.", ADVICE[stage].format(host=host, port=port), is_failure=True))


def look(plan: ServicesPlan, asked: Sequence[str]) -> StageReport:
    """Ask the 8B endpoint one question: the query, profile, summary and context. Shows what it answers."""
    config, key = plan.config.reward, plan.reward.rag_key

    def ask(_: object, findings: Findings) -> None:
        query, profile, summary, context = asked
        action = Action(fields={"user_profile": profile, "rewritten_query": query, "history_summary": summary})
        limits = (config.rag_service.score_threshold, config.rag_service.top_k)

        async def answer() -> None:
            rag = ServiceClients(under_load(config), plan.reward).rag(config.rag_service.base_url or "")
            try:
                given = await rag.chat_8b(context or f"customer: {query}", action, *limits, ids=RequestIds())
            finally:
                await rag.aclose()
            for line in [f"{passage.score:.3f}  {passage.id}" for passage in given.passages] + [given.text]:
                text = line.replace(key, "<the key>") if key else line
                findings.add("".join(char if char.isprintable() else " " for char in text))

        asyncio.run(answer())

    return report_of(PreflightStage("8b", (), (ask,)), cast("Plan", plan))


def suggestion(report: StageReport, concurrency: int) -> dict[str, int]:
    """`rag.max_concurrency`, halved if calls failed, and `rag.timeout_s`, if calls were timed."""
    seconds = [value for name, value in report.figures.items() if name.endswith("_p95_s") and value is not None]
    if not seconds:
        return {}
    failed = any(value for name, value in report.figures.items() if name.endswith(("_failed", "_429")))
    timeout_s = max(math.ceil(TIMEOUT_MARGIN * max(map(float, seconds))), MIN_TIMEOUT_S)
    return {"rag.max_concurrency": max(concurrency // 2, 1) if failed else concurrency, "rag.timeout_s": timeout_s}


def main(argv: Sequence[str] | None = None) -> int:
    """Check everything, print it, and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return ended(argv, lambda: _examine(argv))


def _examine(argv: Sequence[str]) -> int:
    options, settings = _parser().parse_known_args(argv)
    key = [] if options.key_env is None else ["--rag.api_key_env", options.key_env]
    step = ["--num_generations", "1", "--per_device_train_batch_size", str(options.concurrency)]
    limit = ["--rag.max_concurrency", str(options.concurrency), "--max_attempts", "1"]
    kinds = (DataConfig, RewardConfig, StepSettings)
    given = ["--rag.base_url", options.base_url, *key, *step, *limit, *settings]
    config = ServicesConfig(*parse_part(given, kinds))
    plan = ServicesPlan(config, calls=options.requests)
    config.training.branches = config.training.branches or plan.branches_of_rows
    plan.addresses = (options.base_url, "")  # no judge is asked, so none is started
    _ = plan.reward
    out = sys.stderr if options.json else sys.stdout
    if proxies := urllib.request.getproxies():
        print(f"note: set here, and used neither by training nor by this tool: {', '.join(proxies)}", file=sys.stderr)
    reports = list[StageReport]()
    for report in connection(options.base_url):
        reports.append(report)
        print(stage_text(report), file=out, flush=True)
    if report.verdict is not StageVerdict.FAILED:
        asked = (options.query, options.profile, options.summary, options.context)
        reports.append(look(plan, asked) if options.quick else report_of(RAG_STAGE, cast("Plan", plan)))
        print(stage_text(reports[-1]), file=out)
    is_ready, settings = reports[-1].verdict is not StageVerdict.FAILED, suggestion(reports[-1], options.concurrency)
    if options.json:
        stages = [dataclasses.asdict(report) for report in reports]
        print(strict_json({"ready": is_ready, "stages": stages, "suggested": settings}))
    else:
        print("ready" if is_ready else "NOT READY")
        print(*(f"suggested: {name}: {value}" for name, value in settings.items()), sep="\n")
    return 0 if is_ready else EXIT_NOT_READY


def _parser() -> ToolParser:
    parser = ToolParser(
        usage="%(prog)s --base-url URL [--quick] [--json] [--SETTING VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--base-url", required=True, help="the service's address before /v1/rag")
    parser.add_argument("--key-env", help="environment variable that holds the key")
    parser.add_argument("--concurrency", type=int, default=8, help="concurrent calls; default: %(default)s")
    parser.add_argument("--requests", type=int, default=40, help="calls to each endpoint; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="ask 8b one question, and print passages and answer")
    parser.add_argument("--query", default="How much does the beginner course cost?", help="the question of --quick")
    parser.add_argument("--profile", default="", help="the customer's profile, with --quick")
    parser.add_argument("--summary", default="", help="what was said before, with --quick")
    parser.add_argument("--context", help="the conversation, with --quick; default: the question")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
