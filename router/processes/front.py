"""The control plane of a router in several processes: asks the processes, and merges their answers into one.

| endpoint | answer |
|---|---|
| GET /v1/decisions | the newest decisions of all processes |
| GET /v1/decisions/{id} | the answer of the process that took the decision |
| PUT, PATCH, DELETE /v1/policy | changed in the first process, which stores it, then in the others |
| POST, DELETE /v1/workers/{id}/drain | each process hands over what it knows, with its share of the tokens |
| GET /v1/workers/{id}/drain | merged; the state is draining until all processes have handed over |
| GET /v1/shadows | the figures of all processes, pooled |
| PUT, DELETE /v1/shadows | changed in the first process, then in the others |
| GET /v1/workers | the first process's answer, with the doubts of all: each judges ranks by its own requests |
| GET /v1/report, /v1/predictions, /v1/trends | the sums of all processes |
| GET /v1/processes | names, ids and restarts of the processes |
| GET /health, /live | `ok`, as this process lives |
| GET /ready | whether any process is ready |
| GET /metrics | all families of all processes, each once (`merged`) |
| all others | the first answer of a process: each has the fleet, the index and, by the ledger, all requests |
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kv_protocol.errors import UNDECODABLE
from kv_runtime.http.answers import Handler, error_response, json_response
from kv_runtime.telemetry import Family, Projection
from router.attribution.report import SavingsReport
from router.attribution.report import merged as merged_reports
from router.control_plane import control_app
from router.drain.routes import WAIT_S_MAX
from router.live.routes import json_route, list_limit
from router.live.service import TrendsPage, merged_trends
from router.processes.supervisor import Answer, Links, ProcessState, process_families
from router.shadows.service import pooled_page

_Body = dict[str, Any]
_decode = msgspec.json.Decoder(_Body).decode
_TOKENS = "handover_tokens"
SUMMED = frozenset(
    f"kvrouter_{name}"
    for name in (
        "approximate_blocks",
        "attached_engines",
        "encoder_cache_bytes",
        "encoder_cache_segments",
        "http_connections",
        "http_connections_max",
        "inflight_requests",
        "journal_unpublished_records",
        "log_unconfirmed_messages",
        "picker_body_bytes",
        "picker_streams",
        "prompts_waiting_bytes",
        "queued_requests",
        "queued_tokens",
        "recent_prompts_bytes",
    )
)
"""Gauges that are summed: each process has a part."""
LEAST = frozenset({"kvrouter_log_connected", "kvrouter_rank_fit"})
"""Gauges that are merged to the least value: the router is as bad as its worst process."""


class Front:
    """The endpoints of the control plane of all processes."""

    def __init__(self, links: Links, states: Callable[[], list[ProcessState]], registry: CollectorRegistry) -> None:
        self._links, self._states, self._registry = links, states, registry
        self._changing = asyncio.Lock()
        self.policy = self.shadows = b""
        """Bodies of `PUT` with the last change, for processes that start later; empty without a change."""

    def app(self, *, token: str) -> web.Application:
        """Return the application that serves the endpoints."""
        drain = "/v1/workers/{id}/drain"
        policy, shadows = self._changed("policy", bytes), self._changed("shadows", _shadows_of)
        own = [
            web.get("/v1/decisions", self._decisions),
            web.get("/v1/decisions/{id}", self._decision),
            *(web.route(method, "/v1/policy", policy) for method in ("PUT", "PATCH", "DELETE")),
            web.get(drain, self._of_all(_drain_of, more_s=WAIT_S_MAX)),
            *(web.route(method, drain, self._change_drain) for method in ("POST", "DELETE")),
            web.get("/v1/shadows", self._of_all(pooled_page)),
            *(web.route(method, "/v1/shadows", shadows) for method in ("PUT", "DELETE")),
            web.get("/v1/workers", self._of_all(doubted_workers)),
            web.get("/v1/report", self._of_all(merged_reports, SavingsReport)),
            web.get("/v1/predictions", self._of_all(predictions_of)),
            web.get("/v1/trends", self._of_all(merged_trends, TrendsPage)),
            json_route("/v1/processes", lambda: {"processes": [state._asdict() for state in self._states()]}),
            *(json_route(path, lambda: {"status": "ok"}) for path in ("/health", "/live")),
            web.get("/ready", self._ready),
            web.get("/metrics", self._metrics),
        ]
        app = control_app(own, token=token)
        app.router.add_route("*", "/{path:.*}", self._of_the_first)
        return app

    def families(self) -> Iterator[Family]:
        """Yield the metrics of the processes themselves."""
        return process_families(self._states(), self._links.silent_total)

    async def _of_the_first(self, request: web.Request) -> web.Response:
        """Return the answer of the first process that gives one."""
        body, path = await request.read(), request.rel_url.raw_path_qs
        for name in self._links.names:
            answer = await self._links.one(name, request.method, path, body, more_s=WAIT_S_MAX)
            if answer is not None:
                break
        return _passed_on(answer)

    # ---------------------------------------------------------------------------------------------- decisions

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        return await self._of_all(partial(_newest_decisions, list_limit(request.query)))(request)

    async def _decision(self, request: web.Request) -> web.Response:
        answers = await self._links.all(request.rel_url.raw_path_qs)
        return _passed_on(next((answer for answer in answers.values() if answer.is_ok), _refusal(answers)))

    def _of_all(
        self, together: Callable[[list[Any]], object], kind: type[Any] = _Body, *, more_s: float = 0.0
    ) -> Handler:
        """Return a handler that answers with what `together` makes of all answers, or with the first refusal.

        Answers are decoded as `kind`. A process may take `more_s` longer than usual.
        """

        async def handle(request: web.Request) -> web.Response:
            return _merged(await self._links.all(request.rel_url.raw_path_qs, more_s=more_s), together, kind)

        return handle

    # ---------------------------------------------------------------------------------------------- changes

    def _changed(self, kept: Literal["policy", "shadows"], whole: Callable[[bytes], bytes]) -> Handler:
        """Return a handler that changes the first process, and then sets the same in the others.

        `whole` makes the body of their `PUT` from the first one's answer. Processes that start later get it, too.
        """

        async def handle(request: web.Request) -> web.Response:
            path = request.rel_url.raw_path_qs
            async with self._changing:
                first, *others = self._links.names
                changed = await self._links.one(first, request.method, path, await request.read())
                if changed is None or not changed.is_ok:
                    return _passed_on(changed)
                body = whole(changed.body)
                setattr(self, kept, body)
                answers = {name: await self._links.one(name, "PUT", path, body) for name in others}
            behind = [name for name, answer in answers.items() if answer is None or not answer.is_ok]
            if not behind:
                return _passed_on(changed)
            message = f"{', '.join(behind)} did not confirm the change, which the others have; send it again"
            return error_response(503, message, code="not_confirmed")

        return handle

    # ---------------------------------------------------------------------------------------------- draining

    async def _change_drain(self, request: web.Request) -> web.Response:
        """Begin or end a drain in one process after the other: the first one publishes it, the answers are merged."""
        path, names = request.rel_url.raw_path_qs, self._links.names
        body = _shared(await request.read(), len(names))
        found = {name: await self._links.one(name, request.method, path, body) for name in names}
        return _merged({name: answer for name, answer in found.items() if answer is not None}, _changed_drain_of)

    # ---------------------------------------------------------------------------------------------- health

    async def _ready(self, _: web.Request) -> web.Response:
        answers = await self._links.all("/ready")
        unready = {name: reasons for name in self._links.names if (reasons := _reasons(answers.get(name)))}
        is_ready = len(unready) < len(self._links.names)
        lines = [f"{name}: {reason}" for name, reasons in unready.items() for reason in reasons]
        found = {"ready": is_ready, "reasons": [] if is_ready else lines, "notes": lines if is_ready else []}
        return json_response(found, status=200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        answers = await self._links.all("/metrics")
        pages = [answer.body.decode() for answer in answers.values() if answer.is_ok]
        found = merged([self._registry.collect(), *map(text_string_to_metric_families, pages)])
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        body = encoder(Projection(CollectorRegistry(), lambda: found))
        return web.Response(body=body, headers={"Content-Type": content_type})


def merged(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Return the families of all processes, each once, in the order in which they are found first.

    Counters, histograms, summaries and gauges of `SUMMED` are summed. Gauges of `LEAST` get the least value, all others
    the greatest: all processes have the same state, some a moment later.
    """
    families = dict[str, Metric]()
    samples = dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]]()
    for process in processes:
        for family in process:
            known = families.setdefault(family.name, family)
            own = samples.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before = own.get(key)
                value = sample.value if before is None else _value_of(known, before.value, sample.value)
                own[key] = Sample(sample.name, sample.labels, value)
    for name, family in families.items():
        family.samples = list(samples[name].values())
    return list(families.values())


def _value_of(family: Metric, one: float, other: float) -> float:
    if family.type != "gauge" or family.name in SUMMED:
        return one + other
    return min(one, other) if family.name in LEAST else max(one, other)


def _shadows_of(page: bytes) -> bytes:
    """Return the body that sets the shadows of a page, and their budget."""
    found = _decode(page)
    policies = [{"name": each["name"], "policy": each["policy"]} for each in found["shadows"]]
    return msgspec.json.encode({"policies": policies, "budget_us": found["budget_us"]})


def _newest_decisions(limit: int, bodies: list[_Body]) -> _Body:
    found = [each for body in bodies for each in body["decisions"]]
    newest = sorted(found, key=lambda each: float(each["age_s"]))[:limit]
    from_s = max((body["from_s"] for body in bodies if body["from_s"] is not None), default=None)
    return {"decisions": newest, "from_s": from_s}


def predictions_of(bodies: list[_Body]) -> _Body:
    """Return the processes' comparisons, summed by rank. A rank that one process doubts is doubted."""
    ranks: dict[tuple[str, int], _Body] = {}
    for row in (row for body in bodies for row in body["ranks"]):
        known = ranks.setdefault((row["worker_id"], row["dp_rank"]), row)
        if known is not row:
            for name in ("requests", "overpredicted", "underpredicted"):
                known[name] += row[name]
            known["doubt"], known["newest"] = known["doubt"] or row["doubt"], known["newest"] or row["newest"]
    return {**bodies[0], "ranks": list(ranks.values())}


def _changed_drain_of(bodies: list[_Body]) -> _Body:
    published = next((body["published"] for body in bodies if body["published"] is not None), None)
    return {"published": published, "drain": _drain_of([body["drain"] for body in bodies])}


def _drain_of(statuses: list[_Body]) -> _Body:
    """Merge the statuses of a worker's draining: `draining` if one process says so; the hand-overs are summed."""
    known = {status["state"] for status in statuses}
    state = next(each for each in ("draining", "serving", "drained", "left") if each in known)
    handovers = [status["handover"] for status in statuses if status["handover"] is not None]
    return {
        **statuses[0],
        "state": state,
        "running_requests": max(status["running_requests"] for status in statuses),
        "handover": _handover_of(handovers) if handovers else None,
    }


def doubted_workers(bodies: list[_Body]) -> _Body:
    """Return the first process's workers. A rank that it trusts and another doubts gets the other's trust."""
    own, *others = bodies
    doubted = dict[tuple[str, int], _Body]()
    for rank in (rank for each in others for worker in each["workers"] for rank in worker["ranks"]):
        if rank["evidence"] is not None:
            doubted.setdefault((rank["worker_id"], rank["dp_rank"]), rank)
    for rank in (rank for worker in own["workers"] for rank in worker["ranks"]):
        found = doubted.get((rank["worker_id"], rank["dp_rank"]))
        if found is not None and rank["trust"] == "EXACT":
            rank.update({name: found[name] for name in ("trust", "trust_reason", "evidence")})
    return own


def _handover_of(handovers: list[_Body]) -> _Body:
    counts = ("prompts", "listed", "warmed", "failed", "skipped", "budget_tokens", "spent_tokens")
    unfinished = next((each for each in handovers if each["state"] != "over"), handovers[0])
    return {
        **unfinished,
        **{name: sum(each[name] for each in handovers) for name in counts},
        "seconds": max(each["seconds"] for each in handovers),
        "prefixes": [prefix for each in handovers for prefix in each["prefixes"]],
    }


def _shared(body: bytes, processes: int) -> bytes:
    """Return the body of a drain request with a process's share of its tokens; other bodies as they are."""
    try:
        wish = _decode(body) if body.strip() else {}
    except UNDECODABLE:
        return body
    tokens = wish.get(_TOKENS)
    return msgspec.json.encode({**wish, _TOKENS: -(-tokens // processes)}) if type(tokens) is int else body


def _reasons(answer: Answer | None) -> list[str]:
    if answer is None:
        return ["it does not answer"]
    return [] if answer.is_ok else _decode(answer.body)["reasons"]


def _refusal(answers: dict[str, Answer]) -> Answer | None:
    return next((answer for answer in answers.values() if not answer.is_ok), None)


def _merged(
    answers: dict[str, Answer], together: Callable[[list[Any]], object], kind: type[Any] = _Body
) -> web.Response:
    """Return what `together` makes of the answers, or the first refusal."""
    if (refusal := _refusal(answers)) or not answers:
        return _passed_on(refusal)
    bodies = [msgspec.json.decode(each.body, type=kind) for each in answers.values()]
    return json_response(together(bodies), status=max(each.status for each in answers.values()))


def _passed_on(answer: Answer | None) -> web.Response:
    """Return a process's answer as a response; None: a 503 saying that no process answers."""
    if answer is None:
        return error_response(503, "no serving process answers; try again", code="no_process")
    return web.Response(status=answer.status, body=answer.body, content_type=answer.content_type)
