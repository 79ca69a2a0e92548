"""The control plane of a router in several processes: the index's process answers, or asks the serving ones.

| endpoint | answer |
|---|---|
| GET /v1/decisions, /v1/decisions/{id} | of the processes: the newest of all; the one that took it |
| PUT, PATCH, DELETE /v1/policy | kept for processes that start later (`PolicyStore`), changed here, then in all |
| POST, DELETE /v1/workers/{id}/drain | by each process, which hands over what it knows, with its share of the tokens |
| GET /v1/workers/{id}/drain | of the processes: draining until all have handed over |
| GET /v1/shadows | of the processes, pooled |
| PUT, DELETE /v1/shadows | changed in all, and kept for processes that start later |
| GET /v1/workers | of this process, with the doubts of the processes, each of which judges by its own requests |
| GET /v1/planner | of the first process that answers: each knows the load of all, by the shared ledger |
| GET /v1/report | of the processes: the sums of all |
| GET /v1/processes | their names, ids and restarts |
| GET /v1/predictions | the sums of all processes |
| GET /ready | of the processes: whether any is ready |
| GET /metrics | all families of all processes (`merged_metrics.py`) |

The others are those of `ControlPlane`, which knows the fleet, and by the shared ledger all requests.
"""

import asyncio
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kv_protocol.errors import UNDECODABLE
from kv_runtime.files import replace_file
from kv_runtime.http.answers import error_response, json_response
from kv_runtime.telemetry import Family
from router.admin.control_plane import ControlPlane, control_app
from router.attribution.contents import SavingsReport
from router.attribution.contents import merged as merged_reports
from router.live.routes import list_limit
from router.processes.links import Answer, Links
from router.processes.merged_metrics import merged, parsed
from router.processes.metrics import process_families
from router.processes.supervisor import Tally
from router.shadows.service import pooled_page

_Body = dict[str, Any]
_decode = msgspec.json.Decoder(_Body).decode
_decode_report = msgspec.json.Decoder(SavingsReport).decode
_TOKENS = "handover_tokens"


class Front:
    """The endpoints that concern all processes; those of `control` for the rest."""

    def __init__(
        self,
        control: ControlPlane,
        links: Links,
        tally: Tally,
        registry: CollectorRegistry,
        shadows_path: Path,
        *,
        report_rows_max: int,
    ) -> None:
        """`shadows_path`: where changed shadows are kept for processes that start later."""
        self._control, self._links, self._tally, self._registry = control, links, tally, registry
        self._shadows_path = shadows_path
        self._report_rows_max = report_rows_max
        self._changing = asyncio.Lock()

    def app(self, *, token: str) -> web.Application:
        """Return the application that serves the endpoints."""
        drain = "/v1/workers/{id}/drain"
        own = [
            web.get("/v1/decisions", self._decisions),
            web.get("/v1/decisions/{id}", self._decision),
            web.put("/v1/policy", self._change_policy),
            web.patch("/v1/policy", self._change_policy),
            web.delete("/v1/policy", self._change_policy),
            web.post(drain, self._begin_drain),
            web.get(drain, self._show_drain),
            web.delete(drain, self._end_drain),
            web.get("/v1/shadows", self._shadows),
            web.put("/v1/shadows", self._change_shadows),
            web.delete("/v1/shadows", self._change_shadows),
            web.get("/v1/workers", self._workers),
            web.get("/v1/planner", self._planner),
            web.get("/v1/report", self._report),
            web.get("/v1/predictions", self._predictions),
            web.get("/v1/processes", self._processes),
            web.get("/ready", self._ready),
            web.get("/metrics", self._metrics),
        ]
        taken = {(each.method, each.path) for each in own}
        return control_app(
            [*own, *(each for each in self._control.routes() if (each.method, each.path) not in taken)], token=token
        )

    def families(self) -> Iterator[Family]:
        """Yield the metrics of the processes themselves."""
        return process_families(self._tally.read(), self._links.silent_total)

    # ---------------------------------------------------------------------------------------------- decisions

    async def _decisions(self, request: web.Request) -> web.Response:
        limit = list_limit(request.query)
        answers = await self._links.all("GET", "/v1/decisions", query=request.query_string)
        if refusal := _first(answers, lambda answer: not answer.is_ok):
            return _passed_on(refusal)
        if not answers:
            return _no_process_answers()
        found = [each for answer in answers.values() for each in _decode(answer.body)["decisions"]]
        newest = sorted(found, key=lambda each: float(each["age_s"]))[:limit]
        oldest_s = [_decode(answer.body)["from_s"] for answer in answers.values()]
        from_s = max((each for each in oldest_s if each is not None), default=None)
        return json_response({"decisions": newest, "from_s": from_s})

    async def _decision(self, request: web.Request) -> web.Response:
        answers = await self._links.all("GET", request.rel_url.raw_path)
        found = _first(answers, lambda answer: answer.is_ok) or _first(answers, lambda _: True)
        return _passed_on(found)

    async def _predictions(self, request: web.Request) -> web.Response:
        answers = await self._links.all("GET", request.path)
        bodies = [_decode(answer.body) for answer in answers.values() if answer.is_ok]
        return json_response(predictions_of(bodies)) if bodies else _no_process_answers()

    # ---------------------------------------------------------------------------------------------- policy

    async def _change_policy(self, request: web.Request) -> web.Response:
        async with self._changing:
            change = self._control.reset_policy if request.method == "DELETE" else self._control.change_policy
            response = await change(request)
            if response.status != HTTPStatus.OK:
                return response
            assert isinstance(response.body, bytes)
            answers = await self._links.all("PUT", "/v1/policy", response.body)
        return self._confirmed(answers, response)

    # ---------------------------------------------------------------------------------------------- shadows

    async def _shadows(self, _: web.Request) -> web.Response:
        return _pooled(await self._links.all("GET", "/v1/shadows"))

    async def _change_shadows(self, request: web.Request) -> web.Response:
        async with self._changing:
            body = b"" if request.method == "DELETE" else await request.read()
            answers = await self._links.all(request.method, "/v1/shadows", body)
            if not answers or _first(answers, lambda answer: not answer.is_ok):
                return _pooled(answers)
            first = next(iter(answers.values()))
            try:
                await asyncio.to_thread(_keep, self._shadows_path, body and _with_budget(body, first))
            except OSError as error:
                return _shadows_not_kept(self._shadows_path, error)
        return self._confirmed(answers, _pooled(answers))

    def _confirmed(self, answers: dict[str, Answer], response: web.Response) -> web.Response:
        """Return the response to a change, or which processes may have missed it."""
        behind = [name for name in self._links.names if name not in answers or not answers[name].is_ok]
        return _not_confirmed(behind) if behind else response

    # ---------------------------------------------------------------------------------------------- draining

    async def _begin_drain(self, request: web.Request) -> web.Response:
        body = await request.read()
        answers = await self._links.all("POST", request.path, _shared(body, len(self._links.names)))
        if refusal := _first(answers, lambda answer: not answer.is_ok):
            return _passed_on(refusal)
        return _drain_changed(answers)

    async def _end_drain(self, request: web.Request) -> web.Response:
        answers = dict[str, Answer]()
        for name in self._links.names:  # in turn: the first one publishes
            if (answer := await self._links.one(name, "DELETE", request.path)) is not None:
                answers[name] = answer
        if refusal := _first(answers, lambda answer: not answer.is_ok):
            return _passed_on(refusal)
        return _drain_changed(answers)

    async def _show_drain(self, request: web.Request) -> web.Response:
        answers = await self._links.all("GET", request.path, query=request.query_string, more_s=60.0)
        if refusal := _first(answers, lambda answer: not answer.is_ok):
            return _passed_on(refusal)
        statuses = [_decode(answer.body) for answer in answers.values()]
        return json_response(drain_of(statuses)) if statuses else _no_process_answers()

    async def _workers(self, request: web.Request) -> web.Response:
        answers = await self._links.all("GET", "/v1/workers")
        own = await self._control.workers(request)
        assert isinstance(own.body, bytes)
        return json_response(doubted_workers(_decode(own.body), [_decode(each.body) for each in answers.values()]))

    async def _planner(self, request: web.Request) -> web.Response:
        answers = await self._links.all("GET", "/v1/planner", query=request.query_string)
        return _passed_on(_first(answers, lambda answer: answer.is_ok) or _first(answers, lambda _: True))

    async def _report(self, _: web.Request) -> web.Response:
        answers = await self._links.all("GET", "/v1/report")
        if (refusal := _first(answers, lambda answer: not answer.is_ok)) or not answers:
            return _passed_on(refusal)
        reports = [_decode_report(answer.body) for answer in answers.values()]
        return json_response(merged_reports(reports, self._report_rows_max))

    # ---------------------------------------------------------------------------------------------- health

    async def _processes(self, _: web.Request) -> web.Response:
        return json_response({"processes": [state._asdict() for state in self._tally.read()]})

    async def _ready(self, _: web.Request) -> web.Response:
        answers = await self._links.all("GET", "/ready")
        unready = {name: reasons for name in self._links.names if (reasons := _reasons(answers.get(name)))}
        is_ready = len(unready) < len(self._links.names)
        lines = [f"{name}: {reason}" for name, reasons in unready.items() for reason in reasons]
        found = {"ready": is_ready, "reasons": [] if is_ready else lines, "notes": lines if is_ready else []}
        return json_response(found, status=200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        answers = await self._links.all("GET", "/metrics")
        own = list(self._registry.collect())
        found = merged([own, *(parsed(answer.body.decode()) for answer in answers.values() if answer.is_ok)])
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encoder(_Families(found)), headers={"Content-Type": content_type})


class _Families(Collector):
    """A collector of these families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def predictions_of(bodies: list[_Body]) -> _Body:
    """Return what the processes compared, summed by rank; a doubt of one is a doubt."""
    ranks: dict[tuple[str, int], _Body] = {}
    for row in (row for body in bodies for row in body["ranks"]):
        known = ranks.setdefault((row["worker_id"], row["dp_rank"]), row)
        if known is not row:
            for name in ("requests", "overpredicted", "underpredicted"):
                known[name] += row[name]
            known["doubt"], known["newest"] = known["doubt"] or row["doubt"], known["newest"] or row["newest"]
    return {**bodies[0], "ranks": list(ranks.values())}


def drain_of(statuses: list[_Body]) -> _Body:
    """Return the status of a worker's draining of those that the processes state: counts of hand-overs are summed."""
    states: list[Literal["draining", "serving", "drained", "left"]] = ["draining", "serving", "drained", "left"]
    state = next(each for each in states if any(status["state"] == each for status in statuses))
    handovers = [status["handover"] for status in statuses if status["handover"] is not None]
    return {
        **statuses[0],
        "state": state,
        "running_requests": max(status["running_requests"] for status in statuses),
        "handover": _handover_of(handovers) if handovers else None,
    }


def doubted_workers(own: _Body, processes: list[_Body]) -> _Body:
    """Return `own`, the workers, with trust and evidence of the first process that doubts a rank which `own` trusts."""
    doubted = dict[tuple[str, int], _Body]()
    for rank in (rank for each in processes for worker in each["workers"] for rank in worker["ranks"]):
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
    """Return the wish for a hand-over with each process's share of its tokens; what is no such wish stays as it is."""
    try:
        wish = _decode(body) if body.strip() else {}
    except UNDECODABLE:
        return body
    tokens = wish.get(_TOKENS)
    return msgspec.json.encode({**wish, _TOKENS: -(-tokens // processes)}) if type(tokens) is int else body


def _drain_changed(answers: dict[str, Answer]) -> web.Response:
    """Return one response of those to a beginning or ending of a drain: the event that one published, all statuses."""
    bodies = [_decode(answer.body) for answer in answers.values()]
    if not bodies:
        return _no_process_answers()
    published = next((body["published"] for body in bodies if body["published"] is not None), None)
    drain = drain_of([body["drain"] for body in bodies])
    return json_response({"published": published, "drain": drain}, status=max(a.status for a in answers.values()))


def _reasons(answer: Answer | None) -> list[str]:
    if answer is None:
        return ["it does not answer"]
    return [] if answer.is_ok else _decode(answer.body)["reasons"]


def _first(answers: dict[str, Answer], holds: Callable[[Answer], bool]) -> Answer | None:
    return next((answer for answer in answers.values() if holds(answer)), None)


def _passed_on(answer: Answer | None) -> web.Response:
    if answer is None:
        return _no_process_answers()
    return web.Response(status=answer.status, body=answer.body, content_type="application/json")


def _no_process_answers() -> web.Response:
    return error_response(503, "no serving process answers; try again", "server_error", code="no_process")


def _not_confirmed(names: list[str]) -> web.Response:
    message = f"{', '.join(names)} did not confirm the change, which the others have; send it again"
    return error_response(503, message, "server_error", code="not_confirmed")


def _pooled(answers: dict[str, Answer]) -> web.Response:
    """Return one answer of those of the processes to a request for their shadows."""
    if refusal := _first(answers, lambda answer: not answer.is_ok):
        return _passed_on(refusal)
    pages = [_decode(answer.body) for answer in answers.values()]
    return json_response(pooled_page(pages)) if pages else _no_process_answers()


def _with_budget(body: bytes, answer: Answer) -> bytes:
    """Return the body of `PUT /v1/shadows` with the budget in force, which it need not have."""
    return msgspec.json.encode({**_decode(body), "budget_us": _decode(answer.body)["budget_us"]})


def _shadows_not_kept(path: Path, error: OSError) -> web.Response:
    reason = f"TMPDIR: {path} cannot be written: {error.strerror}"
    message = f"{reason}; the shadows changed, but processes that start later will have those before; send it again"
    return error_response(503, message, "server_error", code="not_stored")


def _keep(path: Path, data: bytes) -> None:
    """Write what was changed; without data the configured values are in force again."""
    if data:
        replace_file(path, data)
    else:
        path.unlink(missing_ok=True)
