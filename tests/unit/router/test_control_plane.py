"""The control plane: what may not be asked is a 400 that names it, and how far each rank is trusted is told."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry

from indexer.follow.fold import FoldStatistics, IndexFold
from indexer.follow.inputs import Received
from indexer.service.prefix_explorer import HeatSource, PrefixExplorer, UsesSource
from indexer.service.routes import index_routes
from kv_protocol import fleet
from kv_protocol.codec import pack_u64
from kv_protocol.fleet import Heartbeat
from kv_protocol.hashing import canary
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, LedgerApplied, OutcomeName, WorkerHeard
from kv_protocol.ledger import Finished, Routed
from router.control_plane import ControlPlane
from router.decision.policy import Policy
from router.decision.policy_store import PolicyStore
from router.fleet.trust import ENOUGH
from router.metrics import rank_families
from router.native import built
from router.planner.service import Planner, PlannerSection
from router.shadows.service import Shadows, ShadowSection
from tests.reference.index.index import ReferenceIndex
from tests.support.manual_clock import ManualClock
from tests.support.served import served
from tests.unit.router.plane import NOW_S, TEXT, Answered, Plane, running_plane
from tests.unit.router.samples import rank, registered, route
from tests.unit.router.upstream import Upstream, answers

REGISTERED, EVENT = json.loads(fleet.encode(registered("new"))), "malformed at byte 0: fleet event: "


class NeverThere:
    """An index that never gets to any position; of these ranks it has heard."""

    def __init__(self, *heard: WorkerRank) -> None:
        self._fold = IndexFold(ReferenceIndex())
        for each in heard:
            self._fold.apply(Received(each, Heartbeat(instance="i", epoch=1, last_seq=0)), 0.0)

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
            watched=[web.get("/v1/planner", planner.show)],
            trace_link=trace_link,
            shadows=shadows,
        )
        self.app = planes.app(CollectorRegistry(), token="")
        self.plane, self.url = plane, ""

    async def get(self, path: str) -> Answered:
        """Get a path."""
        return await self.send("GET", path, b"")

    async def send(self, method: str, path: str, body: bytes | io.BytesIO) -> Answered:
        """Send a body to a path."""
        async with self.plane.session.request(method, self.url + path, data=body) as response:
            return Answered(response.status, response.headers.copy(), await response.read())


@asynccontextmanager
async def running_control(trace_link: str = "") -> AsyncIterator[Control]:
    async with running_plane() as plane:
        control = Control(plane, trace_link=trace_link)
        async with served(control.app) as control.url:
            yield control


@pytest_asyncio.fixture
async def control() -> AsyncIterator[Control]:
    async with running_control() as running:
        yield running


def bad_queries() -> Iterator[tuple[str, str]]:
    """Yield addresses of which a parameter may not be so, and its name."""
    at = "/v1/index/position?worker=w0"
    yield from ((f"/v1/decisions?limit={limit}", "limit") for limit in ("0", "1001", "-1", "x", "", "²", "9" * 5000))
    for field, value in product(("dp_rank", "epoch", "seq"), ("x", "-1", "", "9" * 5000)):
        query = {"dp_rank": "0", "epoch": "1", "seq": "1"} | {field: value}
        yield f"{at}&timeout_s=0&{'&'.join(f'{name}={each}' for name, each in query.items())}", field
    for value in ("nan", "inf", "-inf", "1e999", "soon", ""):
        yield f"{at}&epoch=1&seq=1&timeout_s={value}", "timeout_s"
    for objective in ("ttft_s=0", "kept_ratio=nan", "itl_s=x", "x=1"):
        yield f"/v1/planner?{objective}", objective.partition("=")[0]


async def test_a_parameter_that_may_not_be_is_named(control: Control) -> None:
    for path, field in bad_queries():
        answered = await control.get(path)
        assert (answered.status, answered.error["param"]) == (400, field), path


BAD_BODIES = {
    ("PATCH", "/v1/policy"): {
        '{"mode": "os:system"}': 'policy.mode: found "os:system", allowed kv, predicted-ttft',
        '{"overlap_credit": 2}': "policy.overlap_credit: found 2, allowed ",
        '{"seed": 1}': "policy.seed: found 1, allowed only at the start of the router",
        '{"temprature": 1, "luck": 1}': "policy.temprature: unknown; allowed: mode, temperature, ",
        "[]": "body: Expected `object`",
        "{": "body: ",
        json.dumps({"mode": "m" * 60_000}): "policy.mode: ",
        json.dumps({"prefill": [{}] * 15_000}): "policy.prefill: ",
        json.dumps({"prefill": {f"unknown{at}": at for at in range(3000)}}): "policy.prefill",
        json.dumps({"prefill": {"k" * 60_000: 1}}): "policy.prefill",
    },
    ("PUT", "/v1/shadows"): {
        "{": "body: ",
        '{"policies": [{"name": "A", "policy": {"mode": "kv"}}]}': 'shadow.policies.0.name: found "A", allowed ',
        '{"policies": [{"name": "a", "policy": {}}]}': "shadow.policies.0.policy: found {}, allowed ",
        '{"budget_us": 0}': "shadow.budget_us: found 0, allowed ",
        '{"x": 1}': "shadow.x: found 1, allowed ",
        '{"policies": [{"name": "a", "policy": {"ttft_weight": 0}}]}': "shadow.policies: a: policy.ttft_weight: ",
    },
    ("POST", "/v1/workers"): {
        json.dumps({"type": "t" * 100_000}): "",
        json.dumps({"type": "left", "worker_id": "W" * 100_000, "instance": "i", "reason": "drained"}): "",
        json.dumps(
            REGISTERED | {"instance": "i" * 100_000}
        ): f"{EVENT}Expected `str` of length <= 128 - at `$.instance`",
        json.dumps(REGISTERED | {"served_names": [""]}): f"{EVENT}Expected `str` of length >= 1 - at `$.served_names[",
        json.dumps(REGISTERED | {"block_size": 0}): f"{EVENT}Expected `int` >= 1 - at `$.block_size`",
    },
}
"""By method and path: bodies that are refused, and how the message begins."""


async def test_a_body_that_may_not_be_is_refused_in_few_words_and_changes_nothing(control: Control) -> None:
    before = control.plane.routing.policy
    for (method, path), bodies in BAD_BODIES.items():
        for body, words in bodies.items():
            answered = await control.send(method, path, body.encode())
            most = 8192 if path == "/v1/policy" else 1024
            assert (answered.status, len(answered.body) < most) == (400, True), body[:80]
            assert answered.error["message"].startswith(words), answered.error["message"]
    assert control.plane.routing.policy is before


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


async def test_a_worker_whose_answers_report_no_reuse_is_doubted_with_the_evidence(control: Control) -> None:
    usage = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    async with Upstream(answers(200, json.dumps({"choices": [], "usage": usage}).encode())) as worker:
        control.plane.join("w0", worker.base_url, holds=3)
        newest = [await control.plane.post() for _ in range(ENOUGH)][-1].headers["x-decision-id"]
    (shown,) = json.loads((await control.get("/v1/workers")).body)["workers"]
    counts = {"requests": ENOUGH, "overpredicted": ENOUGH, "underpredicted": 0}
    assert shown["ranks"][0]["trust"] == "DEGRADED"
    assert shown["ranks"][0]["evidence"] == {"doubt": "overpredicted", **counts, "newest_decision": newest}
    samples = [sample for family in rank_families(control.plane.routing) for sample in family.samples]
    doubted = {each.labels["doubt"]: each.value for each in samples if each.name.endswith("predictions_doubted_total")}
    assert doubted == {"overpredicted": 1, "underpredicted": 0}


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
    answered = await control.send("PATCH", "/v1/policy", b'{"mode": "round-robin", "ttft_weight": 4}')
    assert (answered.status, json.loads(answered.body)) == (200, before | {"mode": "round-robin", "ttft_weight": 4.0})
    assert plane.routing.decide(route()).policy == "round-robin"
    again = await control.send("PATCH", "/v1/policy", b'{"mode": "kv"}')
    assert json.loads(again.body)["ttft_weight"] == 4.0


async def test_a_put_is_the_whole_policy(control: Control) -> None:
    before = json.loads((await control.get("/v1/policy")).body)
    await control.send("PATCH", "/v1/policy", b'{"temperature": 1, "ttft_weight": 9}')
    answered = await control.send("PUT", "/v1/policy", b'{"mode": "least-loaded"}')
    assert json.loads(answered.body) == before | {"mode": "least-loaded"}
    assert json.loads((await control.get("/v1/policy")).body) == before | {"mode": "least-loaded"}


@pytest.mark.parametrize("method", ["PATCH", "PUT"])
async def test_a_policy_of_more_than_a_mebibyte_is_not_read(control: Control, method: str) -> None:
    policy = b'{"mode": "random"}'
    assert (await control.send(method, "/v1/policy", io.BytesIO(policy.ljust((1 << 20) - 1)))).status == 200
    answered = await control.send(method, "/v1/policy", io.BytesIO(policy.ljust((1 << 20) + 1)))
    assert (answered.status, answered.error["code"]) == (413, "body_too_large")


async def test_of_a_long_name_in_a_path_or_query_the_beginning_is_shown(control: Control) -> None:
    long = "x" * 4000
    for path in ("decisions/", "decisions?limit=", "index/position?seq=1&epoch=1&dp_rank=", "index/position?epoch="):
        answered = await control.get(f"/v1/{path}{long}")
        assert answered.status in (400, 404), path
        assert f'found "{"x" * 79}..., allowed ' in answered.error["message"], path
    for method, path in (("DELETE", ""), ("POST", "/drain"), ("GET", "/drain"), ("DELETE", "/drain")):
        answered = await control.send(method, f"/v1/workers/{long}{path}", b"")
        assert answered.status == 404, (method, path)
        assert answered.error["message"].startswith(f'id: found "{"x" * 79}..., allowed '), (method, path)


async def test_a_changed_policy_is_stored_and_a_reset_returns_to_the_configured_one(tmp_path: Path) -> None:
    async with running_plane(policy=Policy(affinity_discount=0.7)) as plane:
        policies = PolicyStore(str(tmp_path), plane.routing.policy, plane.routing.state.modes)
        control = Control(plane, policies)
        async with served(control.app) as control.url:
            assert (await control.send("PATCH", "/v1/policy", b'{"mode": "random"}')).status == 200
            assert msgspec.json.decode((tmp_path / "policy.json").read_bytes())["fields"] == {"mode": "random"}
            (tmp_path / "policy.new").mkdir()
            refused = await control.send("PATCH", "/v1/policy", b'{"mode": "kv"}')
            assert (refused.status, refused.error["code"], plane.routing.policy.mode) == (503, "not_stored", "random")
            (tmp_path / "policy.new").rmdir()
            assert (await control.send("PUT", "/v1/policy", b'{"mode": "round-robin"}')).status == 200
            restarted = PolicyStore(str(tmp_path), Policy(affinity_discount=0.7), plane.routing.state.modes)
            restarted.restore()
            assert restarted.initial == plane.routing.policy
            assert plane.routing.policy.affinity_discount == Policy().affinity_discount, "a whole policy has defaults"
            reset = await control.send("DELETE", "/v1/policy", b"")
            assert (reset.status, plane.routing.policy) == (200, Policy(affinity_discount=0.7))
            assert msgspec.json.decode((tmp_path / "policy.json").read_bytes())["fields"] == {}


async def test_a_plan_is_computed_for_the_objectives_that_are_asked(control: Control) -> None:
    control.plane.routing.apply(FleetApplied(now_s=NOW_S, event=registered()))
    answered = await control.get("/v1/planner?ttft_s=0.5")
    found = json.loads(answered.body)
    assert (answered.status, found["window_s"], found["objectives"]["ttft_s"]) == (200, 60.0, 0.5)
    assert [(group["advised_workers"], group["reason"]) for group in found["groups"]] == [(1, "idle")]


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
