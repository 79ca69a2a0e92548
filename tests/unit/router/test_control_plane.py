"""The control plane: what may not be asked is a 400 that names it, and how far each rank is trusted is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry

from indexer.follow.fold import FoldStatistics, IndexFold
from indexer.follow.inputs import HeartbeatArrived
from indexer.service.prefix_explorer import HeatSource, PrefixExplorer, UsesSource
from indexer.service.routes import index_routes
from kv_protocol import fleet
from kv_protocol.codec import pack_u64
from kv_protocol.fleet import Heartbeat
from kv_protocol.hashing import canary
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, LedgerApplied, OutcomeName, WorkerHeard
from kv_protocol.ledger import Finished, Routed
from kv_runtime.http.server import HttpServer
from router.control_plane import ControlPlane
from router.decision.policy import Policy
from router.decision.policy_store import PolicyStore
from router.native import built
from router.planner.service import Planner, PlannerSection
from router.shadows.service import Shadows, ShadowSection
from tests.reference.index.index import ReferenceIndex
from tests.support.manual_clock import ManualClock
from tests.unit.router.plane import NOW_S, TEXT, Answered, Plane, running_plane
from tests.unit.router.samples import rank, registered, route


class NeverThere:
    """An index that never gets to any position; of these ranks it has heard."""

    def __init__(self, *heard: WorkerRank) -> None:
        self._fold = IndexFold(ReferenceIndex())
        for each in heard:
            self._fold.apply(HeartbeatArrived(each, Heartbeat(instance="i", epoch=1, last_seq=0)), 0.0)

    def statistics(self) -> FoldStatistics:
        """Return the figures that people read."""
        return self._fold.statistics()

    def refused_ranks(self) -> dict[WorkerRank, str]:
        """Return no ranks."""
        return {}

    def routes(self, heat: HeatSource | None = None, uses: UsesSource | None = None) -> Sequence[web.RouteDef]:
        """Return routes to nothing."""
        return index_routes(self._fold, PrefixExplorer(self._fold, ManualClock(), heat=heat, uses=uses))

    async def wait_for(self, _rank: WorkerRank, _epoch: int, _seq: int) -> None:
        """Wait."""
        await asyncio.Event().wait()


class Control:
    """A control plane on a port that the system chose."""

    def __init__(self, plane: Plane, policies: PolicyStore | None = None, trace_link: str = "") -> None:
        index: Any = NeverThere(rank("w0/0"), rank("w9/0"))
        log: Any = None  # nothing is published here
        handover: Any = SimpleNamespace(status=lambda *_of: None)
        planner = Planner(plane.routing, PlannerSection())
        shadows = Shadows(plane.routing, ShadowSection())
        planes = ControlPlane(
            plane.routing,
            index,
            log,
            handover,
            policies=policies,
            watched=planner.routes(),
            trace_link=trace_link,
            shadows=shadows,
        )
        app = planes.app(CollectorRegistry(), token="")
        self.plane = plane
        self.server = HttpServer(app, "127.0.0.1", 0)

    async def get(self, path: str) -> Answered:
        """Get a path."""
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with self.plane.session.get(url) as response:
            return Answered(response.status, response.headers.copy(), await response.read())

    async def send(self, method: str, path: str, body: bytes) -> Answered:
        """Send a body to a path."""
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with self.plane.session.request(method, url, data=body) as response:
            return Answered(response.status, response.headers.copy(), await response.read())


@asynccontextmanager
async def running_control(trace_link: str = "") -> AsyncIterator[Control]:
    stop = asyncio.Event()
    stop.set()
    async with running_plane() as plane:
        running = Control(plane, trace_link=trace_link)
        await running.server.start()
        yield running
        await running.server.run(stop)


@pytest_asyncio.fixture
async def control() -> AsyncIterator[Control]:
    async with running_control() as running:
        yield running


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "²", "9" * 5000])
async def test_a_bad_limit_is_named(control: Control, limit: str) -> None:
    answered = await control.get(f"/v1/decisions?limit={limit}")
    assert (answered.status, answered.error["param"]) == (400, "limit")


@pytest.mark.parametrize("value", ["x", "-1", "", "9" * 5000])
@pytest.mark.parametrize("field", ["dp_rank", "epoch", "seq"])
async def test_a_bad_position_is_named(control: Control, field: str, value: str) -> None:
    query = {"dp_rank": "0", "epoch": "1", "seq": "1"} | {field: value}
    path = "&".join(f"{name}={each}" for name, each in query.items())
    answered = await control.get(f"/v1/index/position?worker=w0&timeout_s=0&{path}")
    assert (answered.status, answered.error["param"]) == (400, field)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "soon", ""])
async def test_a_wait_that_is_no_time_is_named(control: Control, value: str) -> None:
    answered = await control.get(f"/v1/index/position?worker=w0&epoch=1&seq=1&timeout_s={value}")
    assert (answered.status, answered.error["param"]) == (400, "timeout_s")


@pytest.mark.parametrize("value", ["0", "-5", "0.01"])
async def test_a_wait_that_is_over_says_so(control: Control, value: str) -> None:
    answered = await control.get(f"/v1/index/position?worker=w0&epoch=1&seq=1&timeout_s={value}")
    assert (answered.status, answered.error["code"]) == (504, "not_reached")


async def test_workers_are_listed_with_the_trust_of_every_rank_and_every_field_that_differs(control: Control) -> None:
    control.plane.join("w0", "http://127.0.0.1:1", dp_ranks=(0, 1))
    control.plane.join("w1", "http://127.0.0.1:1", block_size=32, tokenizer_digest="x", canary=canary(32))
    control.plane.index.stale[rank("w0/1")] = "log_away"
    first, second = json.loads((await control.get("/v1/workers")).body)["workers"]
    w0 = {"worker_id": "w0", "evidence": None, "unfit": "", "event_flag": ""}
    assert first["ranks"] == [
        {**w0, "dp_rank": 0, "trust": "EXACT", "trust_reason": ""},
        {**w0, "dp_rank": 1, "trust": "DEGRADED", "trust_reason": "event log away"},
    ]
    assert first["differs"] == []
    differences = [
        {"field": "block_size", "found": 32, "allowed": 16},
        {"field": "tokenizer_digest", "found": "x", "allowed": TEXT.tokenizer_digest},
    ]
    assert second["differs"] == differences
    assert second["ranks"][0]["trust"] == "FALLBACK"
    assert second["ranks"][0]["trust_reason"].startswith("block_size: found 32, allowed 16; tokenizer_digest: found ")


async def test_the_index_is_shown_with_the_trust_of_every_rank_and_what_was_routed_there(control: Control) -> None:
    control.plane.join("w0", "http://127.0.0.1:1")
    routed = Routed(lease_id="l", worker_id="w0", dp_rank=0, blocks=pack_u64([1, 2, 3]), uncached_tokens=1)
    for event in (routed, Finished(lease_id="l")):
        control.plane.state.apply(LedgerApplied(now_s=NOW_S, event=event))
    told = json.loads((await control.get("/v1/index")).body)
    trust = [(each["worker_id"], each["dp_rank"], each["trust"], each["trust_reason"]) for each in told["ranks"]]
    assert trust == [("w0", 0, "EXACT", ""), ("w9", 0, "FALLBACK", "its worker is not registered")]
    assert told["approximate_blocks"] == {"w0/0": 3}


async def test_decisions_say_where_the_overlap_came_from_and_what_of_it_was_on_its_way(control: Control) -> None:
    plane = control.plane
    plane.join("w0", "http://127.0.0.1:1", holds=1)
    leases = [plane.routing.take(plane.routing.decide(asked)) for asked in (route(decision_id="d1"), route())]
    plane.index.stale[rank("w0/0")] = "never_heard"
    leases.append(plane.routing.take(plane.routing.decide(route(decision_id="d3"))))
    listed = json.loads((await control.get("/v1/decisions")).body)["decisions"]
    fields = ("overlap_source", "overlap_blocks", "predicted_blocks", "trust")
    assert [tuple(each[field] for field in fields) for each in listed] == [
        ("approximate", 2, 2, "FALLBACK"),
        ("index", 1, 2, "EXACT"),
        ("index", 1, 0, "EXACT"),
    ]
    (shown,) = json.loads((await control.get("/v1/decisions/d-1")).body)["decision"]["candidates"]
    assert (shown["overlap_source"], shown["overlap_blocks"], shown["predicted_blocks"]) == ("index", [1, 1, 1, 1], 2)
    for lease in leases:
        lease.end("ok")


async def test_a_decision_is_shown_with_its_sentence_and_its_predictions_beside_its_outcome(control: Control) -> None:
    plane = control.plane
    plane.join("w0", "http://127.0.0.1:1", holds=1)
    lease = plane.routing.take(plane.routing.decide(route(decision_id="d1", request_id="r")))
    before = json.loads((await control.get("/v1/decisions/d1")).body)
    lease.end("ok", built.Answer(cached_tokens=0))
    after = json.loads((await control.get("/v1/decisions/d1")).body)
    assert before["sentence"].endswith("its outcome is not known.")
    assert before["misses"] == {"cached_tokens": None, "ttft_s": None}
    assert (
        before["predicted"]["cached_tokens"] == after["predicted"]["cached_tokens"] == after["decision"]["block_size"]
    )
    assert before["predicted"]["ttft_s"] > 0
    assert after["misses"]["cached_tokens"] == after["decision"]["block_size"]
    assert "the prediction was 16 tokens too high, 16 cached tokens predicted, 0 reported" in after["sentence"]
    assert after["trace_url"] is None


async def test_a_decision_links_to_its_trace_with_its_ids_quoted() -> None:
    link = "https://traces.example/?q={request_id}&d={decision_id}&{other}"
    async with running_control(trace_link=link) as control:
        control.plane.join("w0", "http://127.0.0.1:1")
        request = route(decision_id="d1", request_id="r&x=1/{decision_id}")
        control.plane.routing.take(control.plane.routing.decide(request)).end("ok")
        shown = json.loads((await control.get("/v1/decisions/d1")).body)
    assert shown["trace_url"] == "https://traces.example/?q=r%26x%3D1%2F%7Bdecision_id%7D&d=d1&{other}"


async def test_a_target_that_a_retry_missed_counts_from_the_first_decision_in_lists_too(control: Control) -> None:
    plane = control.plane
    plane.join("w0", "http://127.0.0.1:1")
    outcomes: dict[str, OutcomeName] = {"d1": "failed", "d2": "ok"}
    for decision_id, outcome in outcomes.items():
        asked = route(decision_id=decision_id, request_id="r", ttft_target_s=1.0)
        lease = plane.routing.take(plane.routing.decide(asked))
        await plane.clock.advance(3.0)
        plane.hear("w0")
        lease.first_token()
        lease.end(outcome)
    listed = json.loads((await control.get("/v1/decisions")).body)["decisions"]
    shown = json.loads((await control.get("/v1/decisions/d2")).body)
    late_s = [each["misses"]["ttft_s"] for each in (*listed, shown, *shown["decisions"])]
    assert late_s == pytest.approx([5.0, 2.0, 5.0, 2.0, 5.0])


async def test_a_request_shows_all_its_decisions_phase_by_phase(control: Control) -> None:
    plane = control.plane
    plane.join("w0", "http://127.0.0.1:1", role="prefill")
    plane.join("w1", "http://127.0.0.1:1", role="decode")
    for each in (
        route(decision_id="d1", request_id="r", phase="prefill"),
        route(decision_id="d2", request_id="r", phase="decode"),
    ):
        plane.routing.take(plane.routing.decide(each)).end("ok")
    for any_id, decision_id in (("r", "d2"), ("d1", "d1")):
        shown = json.loads((await control.get(f"/v1/decisions/{any_id}")).body)
        assert shown["decision"]["decision_id"] == decision_id
        assert [each["decision"]["phase"] for each in shown["decisions"]] == ["prefill", "decode"]
        assert [each["outcome"]["outcome"] for each in shown["decisions"]] == ["ok", "ok"]
        assert "(prefill), 40 tokens for m, went to w0/0" in shown["decisions"][0]["explanation"]


async def test_version_is_the_distributions(control: Control) -> None:
    answered = await control.get("/version")
    assert (answered.status, json.loads(answered.body)) == (200, {"version": version("kv-router")})


async def test_a_patch_changes_what_it_names_and_the_next_decision_is_taken_so(control: Control) -> None:
    plane = control.plane
    plane.join("w0", "http://127.0.0.1:1")
    before = json.loads((await control.get("/v1/policy")).body)
    answered = await control.send("PATCH", "/v1/policy", b'{"mode": "round-robin", "prefill_scale": 4}')
    assert (answered.status, json.loads(answered.body)) == (200, before | {"mode": "round-robin", "prefill_scale": 4.0})
    assert plane.routing.decide(route()).policy == "round-robin"
    again = await control.send("PATCH", "/v1/policy", b'{"mode": "kv"}')
    assert json.loads(again.body)["prefill_scale"] == 4.0


async def test_a_put_is_the_whole_policy(control: Control) -> None:
    before = json.loads((await control.get("/v1/policy")).body)
    await control.send("PATCH", "/v1/policy", b'{"temperature": 1, "history_weight": 0}')
    answered = await control.send("PUT", "/v1/policy", b'{"mode": "least-loaded"}')
    assert json.loads(answered.body) == before | {"mode": "least-loaded"}
    assert json.loads((await control.get("/v1/policy")).body) == before | {"mode": "least-loaded"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"mode": "os:system"}', 'policy.mode: found "os:system", allowed kv, kv-blocks, predicted-ttft'),
        (b'{"overlap_credit": 2}', "policy.overlap_credit: found 2, allowed "),
        (b'{"seed": 1}', "policy.seed: found 1, allowed only at the start of the router"),
        (b'{"temprature": 1, "luck": 1}', "policy.temprature: unknown; allowed: mode, temperature, "),
        (b"[]", "body: Expected `object`"),
        (b"{", "body: "),
    ],
)
async def test_a_policy_that_may_not_be_is_named_and_nothing_changes(control: Control, body: bytes, words: str) -> None:
    before = control.plane.routing.policy
    answered = await control.send("PATCH", "/v1/policy", body)
    assert answered.status == 400
    assert answered.error["message"].startswith(words)
    assert control.plane.routing.policy is before


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"mode": "m" * 60_000}),
        json.dumps({"prefill": [{}] * 15_000}),
        json.dumps({"prefill": {f"unknown{at}": at for at in range(3000)}}),
        json.dumps({"prefill": {"k" * 60_000: 1}}),
    ],
)
async def test_the_refusal_of_a_long_policy_is_short(control: Control, body: str) -> None:
    answered = await control.send("PATCH", "/v1/policy", body.encode())
    assert (answered.status, len(answered.body) < 8192) == (400, True)


@pytest.mark.parametrize("method", ["PATCH", "PUT"])
async def test_a_policy_of_more_than_64_kib_is_not_read(control: Control, method: str) -> None:
    policy = b'{"mode": "random"}'
    assert (await control.send(method, "/v1/policy", policy.ljust(1 << 16))).status == 200
    answered = await control.send(method, "/v1/policy", policy.ljust((1 << 16) + 1))
    assert (answered.status, answered.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "body",
    [
        b'{"type": "' + b"t" * 100_000 + b'"}',
        b'{"type": "left", "worker_id": "' + b"W" * 100_000 + b'", "instance": "i", "reason": "drained"}',
    ],
)
async def test_the_refusal_of_a_long_registration_is_short(control: Control, body: bytes) -> None:
    answered = await control.send("POST", "/v1/workers", body)
    assert (answered.status, len(answered.body) < 1024) == (400, True)


@pytest.mark.parametrize(("field", "value"), [("instance", "i" * 100_000), ("served_names", [""]), ("block_size", 0)])
async def test_a_registration_beyond_a_bound_is_refused_by_field(control: Control, field: str, value: object) -> None:
    fields = json.loads(fleet.encode(registered("new"))) | {field: value}
    answered = await control.send("POST", "/v1/workers", json.dumps(fields).encode())
    assert answered.status == 400
    assert f"at `$.{field}" in answered.error["message"]
    assert len(answered.body) < 1024


@pytest.mark.parametrize(
    "path", ["decisions/", "decisions?limit=", "index/position?seq=1&epoch=1&dp_rank=", "index/position?epoch="]
)
async def test_of_a_long_path_or_query_the_beginning_is_shown(control: Control, path: str) -> None:
    answered = await control.get(f"/v1/{path}{'x' * 4000}")
    assert answered.status in (400, 404)
    assert f'found "{"x" * 79}..., allowed ' in answered.error["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "{}"), ("POST", "{}/drain"), ("GET", "{}/drain"), ("DELETE", "{}/drain")]
)
async def test_of_a_long_worker_id_the_beginning_is_shown(control: Control, method: str, path: str) -> None:
    answered = await control.send(method, f"/v1/workers/{path.format('x' * 4000)}", b"")
    assert answered.status == 404
    assert answered.error["message"].startswith(f'id: found "{"x" * 79}..., allowed ')


async def test_a_changed_policy_is_stored_and_a_reset_returns_to_the_configured_one(tmp_path: Path) -> None:
    stop = asyncio.Event()
    stop.set()
    async with running_plane(policy=Policy(spill_tokens=7)) as plane:
        policies = PolicyStore(str(tmp_path), plane.routing.policy, plane.routing.state.modes)
        control = Control(plane, policies)
        await control.server.start()
        assert (await control.send("PATCH", "/v1/policy", b'{"mode": "random"}')).status == 200
        assert msgspec.json.decode((tmp_path / "policy.json").read_bytes())["fields"] == {"mode": "random"}
        (tmp_path / "policy.new").mkdir()
        refused = await control.send("PATCH", "/v1/policy", b'{"mode": "kv"}')
        assert (refused.status, refused.error["code"], plane.routing.policy.mode) == (503, "not_stored", "random")
        (tmp_path / "policy.new").rmdir()
        assert (await control.send("PUT", "/v1/policy", b'{"mode": "round-robin"}')).status == 200
        restarted = PolicyStore(str(tmp_path), Policy(spill_tokens=7), plane.routing.state.modes)
        restarted.restore()
        assert restarted.initial == plane.routing.policy
        assert plane.routing.policy.spill_tokens == Policy().spill_tokens, "a whole policy has defaults"
        reset = await control.send("DELETE", "/v1/policy", b"")
        assert (reset.status, plane.routing.policy) == (200, Policy(spill_tokens=7))
        assert msgspec.json.decode((tmp_path / "policy.json").read_bytes())["fields"] == {}
        await control.server.run(stop)


async def test_a_plan_is_computed_for_the_objectives_that_are_asked(control: Control) -> None:
    control.plane.routing.apply(FleetApplied(now_s=NOW_S, event=registered()))
    answered = await control.get("/v1/planner?ttft_s=0.5")
    found = json.loads(answered.body)
    assert (answered.status, found["window_s"], found["objectives"]["ttft_s"]) == (200, 60.0, 0.5)
    assert [(group["advised_workers"], group["reason"]) for group in found["groups"]] == [(1, "idle")]


@pytest.mark.parametrize(
    ("query", "field"), [("ttft_s=0", "ttft_s"), ("kept_ratio=nan", "kept_ratio"), ("itl_s=x", "itl_s"), ("x=1", "x")]
)
async def test_objectives_that_cannot_be_are_named(control: Control, query: str, field: str) -> None:
    answered = await control.get(f"/v1/planner?{query}")
    assert (answered.status, json.loads(answered.body)["error"]["param"]) == (400, field)


async def test_shadows_are_set_shown_beside_a_decision_and_reset(control: Control) -> None:
    shadows = {"policies": [{"name": "turns", "policy": {"mode": "round-robin"}}], "budget_us": 20}
    answered = await control.send("PUT", "/v1/shadows", json.dumps(shadows).encode())
    page = json.loads(answered.body)
    assert (answered.status, page["budget_us"], page["live"]["mode"]) == (200, 20.0, control.plane.routing.policy.mode)
    assert [each["policy"] for each in page["shadows"]] == [{"mode": "round-robin"}]
    control.plane.routing.apply(FleetApplied(now_s=NOW_S, event=registered()))
    control.plane.routing.apply(WorkerHeard(now_s=NOW_S, worker_id="w0", instance=registered().instance))
    control.plane.routing.take(control.plane.routing.decide(route(decision_id="d-9"))).end("ok")
    explained = json.loads((await control.get("/v1/decisions/d-9")).body)
    assert [(each["name"], each["agrees"]) for each in explained["shadows"]] == [("turns", True)]
    reset = json.loads((await control.send("DELETE", "/v1/shadows", b"")).body)
    assert (reset["shadows"], json.loads((await control.get("/v1/shadows")).body)) == ([], reset)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("{", "body: "),
        ('{"policies": [{"name": "A", "policy": {"mode": "kv"}}]}', 'shadow.policies.0.name: found "A", allowed '),
        ('{"policies": [{"name": "a", "policy": {}}]}', "shadow.policies.0.policy: found {}, allowed "),
        ('{"budget_us": 0}', "shadow.budget_us: found 0, allowed "),
        ('{"x": 1}', "shadow.x: found 1, allowed "),
        ('{"policies": [{"name": "a", "policy": {"ttft_weight": 0}}]}', "shadow.policies: a: policy.ttft_weight: "),
    ],
)
async def test_shadows_that_cannot_be_are_named(control: Control, body: str, found: str) -> None:
    answered = await control.send("PUT", "/v1/shadows", body.encode())
    assert answered.status == 400
    assert json.loads(answered.body)["error"]["message"].startswith(found)
