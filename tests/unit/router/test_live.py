"""What is watched over HTTP: the fleet's columns, its past, and its decisions."""

from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry

from kv_protocol.ids import WorkerRank
from router.control_plane import ControlPlane
from router.feeds.watch import FleetWatch
from router.live.routes import live_routes
from router.live.service import Live, Row
from router.native import built
from router.processes.front import predictions_of
from tests.support.served import served
from tests.unit.router.plane import Plane, running_plane
from tests.unit.router.samples import MODEL, rank, route

TOKEN = "a-secret"


class Blocks:
    """What is asked of an index: two ranks hold blocks."""

    def block_counts(self) -> dict[WorkerRank, tuple[int, ...]]:
        """Return the blocks of both."""
        return {rank("w0/0"): (10, 2, 0, 0), rank("w0/1"): (7, 0, 0, 0)}

    def routes(self, *_sources: object) -> list[web.RouteDef]:
        """Return no routes."""
        return []


class Watched:
    """A plane whose fleet is watched; `read` its answers."""

    def __init__(self, plane: Plane) -> None:
        index: Any = Blocks()
        self.plane, self.index = plane, index
        self.live, self.watch = Live(plane.routing, index, Row, ()), FleetWatch(plane.routing, dict)
        self._open = list[Any]()
        none: Any = None  # nothing is published or drained here
        watched = live_routes(self.live, self.watch.marks)
        control = ControlPlane(plane.routing, index, none, none, watched=watched)
        self.app, self.url = control.app(CollectorRegistry(), token=TOKEN), ""

    async def get(self, path: str, status: int = 200) -> Any:
        """Return the JSON of a path."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.plane.session.get(self.url + path, headers=headers) as response:
            assert response.status == status, await response.text()
            return await response.json()

    def decide(self, model: str = MODEL, **outcome: Any) -> str:
        """Take a decision; with an outcome it is over."""
        request = route(model=model)
        verdict = self.plane.routing.decide(request)
        lease = self.plane.routing.take(verdict)
        lease.first_token()
        if outcome:
            lease.end(outcome.pop("name", "ok"), built.Answer(**outcome))
        else:
            self._open.append(lease)
        return request.decision_id

    def end(self) -> None:
        """End the requests that are in flight."""
        for lease in self._open:
            lease.end("ok")


@pytest_asyncio.fixture
async def made() -> AsyncIterator[Watched]:
    """A plane with a worker of two ranks, watched."""
    async with running_plane() as plane:
        plane.join("w0", "http://127.0.0.1:1", dp_ranks=(0, 1))
        made = Watched(plane)
        async with served(made.app) as made.url:
            yield made
        made.end()


async def test_the_fleet_is_columns_whose_words_are_numbers(made: Watched) -> None:
    made.plane.join("w1", "http://127.0.0.1:1", role="prefill")
    made.plane.index.stale[rank("w0/1")] = "behind"
    fleet = await made.get("/v1/fleet")
    workers, ranks = fleet["workers"], fleet["ranks"]
    assert (fleet["source"], workers["worker_id"], workers["first_rank"]) == ("now", ["w0", "w1"], [0, 2])
    assert [fleet["roles"][each] for each in workers["role"]] == ["aggregated", "prefill"]
    assert (ranks["worker"], ranks["dp_rank"]) == ([0, 0, 1], [0, 1, 0])
    assert (ranks["trust"], fleet["reasons"][ranks["trust_reason"][1]]) == ([0, 1, 0], "behind")
    assert (ranks["gpu_blocks"], ranks["host_blocks"]) == ([10, 7, 0], [2, 0, 0])
    assert {len(column) for column in ranks.values()} == {3}
    assert {len(column) for column in workers.values()} == {2}


async def test_what_was_routed_and_reused_is_counted_by_rank(made: Watched) -> None:
    for _ in range(4):
        made.decide(cached_tokens=16)
    made.decide()
    fleet = await made.get("/v1/fleet")
    ranks = fleet["ranks"]
    assert (sum(ranks["decided_total"]), fleet["requests"]["decided_total"]) == (5, 5)
    assert fleet["requests"]["in_flight"] == sum(ranks["active_requests"]) == 1
    ratios = [each for each in ranks["hit_ratio"] if each is not None]
    assert ratios
    assert all(0 <= each <= 1 for each in ratios)


async def test_reuse_beyond_a_prompt_length_that_is_a_lower_bound_counts_as_the_whole_prompt(made: Watched) -> None:
    made.decide(cached_tokens=1_000_000)
    fleet = await made.get("/v1/fleet")
    assert [each for each in fleet["ranks"]["hit_ratio"] if each is not None] == [1.0]


async def test_the_fleet_of_a_moment_is_the_one_that_was_kept_then(made: Watched) -> None:
    await made.live.keep()
    first_s = made.plane.clock.wall_ns() / 1e9
    await made.plane.clock.advance(10.0)
    made.plane.hear("w0")
    made.plane.join("w1", "http://127.0.0.1:1")
    await made.live.keep()
    then = await made.get(f"/v1/fleet?at={first_s + 9}")
    assert (then["source"], then["workers"]["worker_id"], then["at_s"]) == ("ring", ["w0"], round(first_s, 3))
    assert (await made.get(f"/v1/fleet?at={first_s + 10}"))["workers"]["worker_id"] == ["w0", "w1"]
    history = await made.get("/v1/history")
    assert (history["ring"]["samples"], history["ring"]["from_s"]) == (2, round(first_s, 3))
    if first_s >= 1:
        missing = await made.get(f"/v1/fleet?at={first_s - 1}", 404)
        assert (missing["error"]["code"], missing["error"]["param"]) == ("not_recorded", "at")


async def test_a_parameter_that_may_not_be_is_named(made: Watched) -> None:
    for path, value in product(("/v1/fleet", "/v1/decisions"), ("x", "-1", "nan", "inf", "")):
        assert (await made.get(f"{path}?at={value}", 400))["error"]["param"] == "at", (path, value)


async def test_decisions_are_found_by_worker_model_outcome_and_time(made: Watched) -> None:
    over = made.decide(cached_tokens=0)
    moment_s = made.plane.clock.wall_ns() / 1e9
    await made.plane.clock.advance(1.0)
    made.plane.hear("w0")
    failed, left_open = made.decide(name="failed"), made.decide()

    async def ids(query: str) -> set[str]:
        return {each["decision_id"] for each in (await made.get(f"/v1/decisions?{query}"))["decisions"]}

    assert await ids("") == {over, failed, left_open}
    assert await ids("outcome=ok") == {over}
    assert await ids("outcome=failed&worker=w0") == {failed}
    assert await ids("outcome=open") == {left_open}
    assert await ids("worker=w9") == await ids("model=other") == set()
    assert await ids(f"model={MODEL}&at={moment_s + 0.5}") == {over}
    listed = await made.get("/v1/decisions")
    assert (listed["from_s"], listed["decisions"][0]["model"]) == (round(moment_s, 3), MODEL)


async def test_the_history_has_the_marks_of_what_changed(made: Watched) -> None:
    made.watch.look()
    (mark,) = (await made.get("/v1/history"))["marks"]
    assert (mark["kind"], mark["text"]) == ("router_started", "the router began to watch")


async def test_what_processes_compared_is_summed_by_rank() -> None:
    one = {"worker_id": "w0", "dp_rank": 0, "requests": 20, "overpredicted": 3, "underpredicted": 0}
    rows = [
        {**one, "doubt": "", "newest": "a"},
        {**one, "doubt": "overpredicted", "newest": ""},
        {**one, "dp_rank": 1, "doubt": "", "newest": "b"},
    ]
    found = predictions_of([{"window": 64, "ranks": [rows[0], rows[2]]}, {"window": 64, "ranks": [rows[1]]}])
    assert [(each["dp_rank"], each["requests"], each["overpredicted"], each["doubt"]) for each in found["ranks"]] == [
        (0, 40, 6, "overpredicted"),
        (1, 20, 3, ""),
    ]
