"""How a worker is drained over HTTP: what may be wished for, what is told of it, and what happens at once."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from indexer.embedded import BadParameter
from kv_protocol import fleet, subjects
from kv_protocol.fleet import FleetEvent, WorkerDraining, decode_fleet_event
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.journal import FleetApplied
from kv_runtime.event_log import BrokerUnavailable
from router.control_plane import ControlPlane
from router.decision.eligibility import NoEligibleWorker
from router.decision.routing import Lease
from router.drain.routes import SECONDS_MAX, TOKENS_MAX, handover_limits
from tests.support.served import served
from tests.unit.router.plane import NOW_S, Answered, until
from tests.unit.router.samples import MODEL, registered, route, state
from tests.unit.router.test_handover import Draining, asked, draining
from tests.unit.router.upstream import answers, says_and_waits

PATH = "/v1/workers/w0/drain"
DEFAULTS = (200_000, 60.0)
KEYS = (b"k" * 32,)


@pytest.mark.parametrize(
    ("body", "wish"),
    [
        (b"", DEFAULTS),
        (b"{}", DEFAULTS),
        (b'{"handover_tokens": 0}', (0, 60.0)),
        (b'{"handover_s": 5, "handover_tokens": 7}', (7, 5.0)),
        (b'{"handover_s": 3600, "handover_tokens": 1073741824}', (TOKENS_MAX, SECONDS_MAX)),
    ],
)
def test_what_is_not_wished_for_is_as_configured(body: bytes, wish: tuple[int, float]) -> None:
    assert handover_limits(body, *DEFAULTS) == wish


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[]", 'body: found "[]", allowed a JSON object'),
        (b"\xff", "body: found "),
        (b'{"handover": 1}', "handover: found 1, allowed handover_tokens and handover_s"),
        (b'{"handover_tokens": -1}', "handover_tokens: found -1, allowed 0..1073741824"),
        (b'{"handover_tokens": true}', "handover_tokens: found true, allowed 0..1073741824"),
        (b'{"handover_s": 0}', "handover_s: found 0, allowed more than 0, 3600 at most"),
        (b'{"handover_s": "soon"}', 'handover_s: found "soon", allowed more than 0, 3600 at most'),
        (b'{"handover_s": 3601}', "handover_s: found 3601, allowed more than 0, 3600 at most"),
    ],
)
def test_a_wish_that_may_not_be_is_named(body: bytes, words: str) -> None:
    with pytest.raises(BadParameter) as refused:
        handover_limits(body, *DEFAULTS)
    assert str(refused.value).startswith(words)


class Log:
    """A log that keeps what it is told; while it is away it refuses it."""

    def __init__(self) -> None:
        self.events: list[FleetEvent] = []
        self.headers: Any = None
        self.is_away = False

    async def publish(self, _subject: str, data: bytes, headers: Any) -> None:
        """Keep an event."""
        self.headers = headers
        if self.is_away:
            raise BrokerUnavailable("the log is away")
        self.events.append(decode_fleet_event(data))


class Control:
    """A control plane on a port that the system chose, of a router whose worker w0 is drained through it."""

    def __init__(self, found: Draining) -> None:
        self.found, self.log = found, Log()
        index: Any = SimpleNamespace(routes=lambda *_sources: [])  # nothing is asked of it here
        log: Any = self.log
        self.gate = FleetGate(KEYS)
        plane = ControlPlane(found.plane.routing, index, log, found.handover, self.gate)
        self.app, self.url = plane.app(CollectorRegistry(), token=""), ""

    async def ask(self, method: str, path: str = PATH, body: bytes = b"") -> Answered:
        async with self.found.plane.session.request(method, self.url + path, data=body) as response:
            return Answered(response.status, response.headers.copy(), await response.read())

    async def post(self, body: bytes = b"") -> Answered:
        """Drain."""
        return await self.ask("POST", body=body)

    async def get(self, query: str = "") -> Answered:
        """Ask how it stands."""
        return await self.ask("GET", PATH + query)

    async def put_back(self) -> Answered:
        """End the drain."""
        return await self.ask("DELETE")

    async def state(self) -> str:
        """Return the state alone."""
        return str(json.loads((await self.get()).body)["state"])

    def running(self) -> Lease:
        """Return the lease of a request that runs at w0."""
        routing = self.found.plane.routing
        return routing.take(routing.decide(route(pinned_worker="w0")))


@pytest_asyncio.fixture
async def control() -> AsyncIterator[Control]:
    async with draining(answers(500), answers(200)) as found:
        control = Control(found)
        async with served(control.app) as control.url:
            yield control


async def test_a_worker_that_drains_gets_nothing_new_from_then_on(control: Control) -> None:
    answered = await control.post(b'{"handover_tokens": 0}')
    assert answered.status == 202
    event = WorkerDraining(worker_id="w0", instance="w0-1", by_hand=True)
    assert control.log.events == [event]
    assert json.loads(answered.body)["published"] == {
        "type": "draining", "worker_id": "w0", "instance": "w0-1", "by_hand": True,
    }  # fmt: skip
    assert json.loads(answered.body)["drain"] == {
        "worker_id": "w0",
        "state": "drained",
        "running_requests": 0,
        "handover": None,
    }
    with pytest.raises(NoEligibleWorker):
        control.found.plane.routing.decide(route(pinned_worker="w0"))


async def test_what_the_control_plane_publishes_is_signed_later_than_what_the_fleet_said(control: Control) -> None:
    subject, told = subjects.fleet(MODEL, "w0"), fleet.encode(registered())
    reader = FleetGate(KEYS)
    said = FleetGate(KEYS).headers(subject, "w0", told, 2_000_000_000_000_000_000)
    for gate in (control.gate, reader):
        gate.admit(subject, told, said)
    await control.post(b'{"handover_tokens": 0}')
    (drained,) = control.log.events
    assert reader.admit(subject, fleet.encode(drained), control.log.headers) == drained


async def test_another_address_of_a_registered_instance_is_not_published(control: Control) -> None:
    control.gate.admit(*signed_registration())
    moved = fleet.encode(registered(base_url="http://127.0.0.1:2"))
    answered = await control.ask("POST", "/v1/workers", moved)
    assert answered.status == 409
    assert json.loads(answered.body)["error"]["param"] == "base_url"
    assert b"allowed http://127.0.0.1:1 of instance w0-1" in answered.body
    assert control.log.events == []


def signed_registration() -> tuple[str, bytes, dict[str, str]]:
    """Return w0's registration as its agent publishes it."""
    subject, data = subjects.fleet(MODEL, "w0"), fleet.encode(registered())
    return subject, data, FleetGate(KEYS).headers(subject, "w0", data, 1)


async def test_a_drain_hands_over_by_the_configured_budget(control: Control) -> None:
    control.found.recent.add(asked(1))
    await control.post()
    await until(lambda: control.found.status().state == "over")
    told = json.loads((await control.get()).body)["handover"]
    assert (told["budget_tokens"], told["within_s"]) == DEFAULTS
    assert (told["warmed"], told["prefixes"][0]["outcome"]) == (1, "warmed")


async def test_a_worker_is_drained_once_its_requests_are_over(control: Control) -> None:
    assert await control.state() == "serving"
    lease = control.running()
    await control.post(b'{"handover_tokens": 0}')
    assert json.loads((await control.get()).body)["running_requests"] == 1
    assert await control.state() == "draining"
    lease.end("ok")
    assert await control.state() == "drained"


@pytest.mark.parametrize("ends", [True, False])
async def test_a_wait_lasts_until_the_worker_is_drained_or_its_time_is_over(control: Control, ends: bool) -> None:
    lease = control.running()
    await control.post(b'{"handover_tokens": 0}')
    waiting = asyncio.ensure_future(control.get("?wait=0.5"))
    await until(lambda: bool(control.found.plane.clock.sleepers))
    if ends:
        lease.end("ok")
    await control.found.plane.clock.advance(0.1 if ends else 1.0)
    assert json.loads((await waiting).body)["state"] == ("drained" if ends else "draining")
    lease.end("ok")


async def test_a_worker_is_not_drained_while_it_is_handed_over(control: Control) -> None:
    control.found.upstreams["w1"].script = says_and_waits(b"")
    control.found.recent.add(asked(1))
    answered = await control.post()
    assert json.loads(answered.body)["drain"]["state"] == "draining"
    assert await control.state() == "draining"


async def test_what_was_handed_over_is_told_after_the_worker_left_and_not_of_its_next_life(control: Control) -> None:
    control.found.recent.add(asked(1))
    await control.post()
    await until(lambda: control.found.status().state == "over")
    control.found.plane.leave("w0")
    told = json.loads((await control.get()).body)
    assert (told["state"], told["handover"]["warmed"]) == ("left", 1)
    control.found.plane.join("w0", "http://127.0.0.1:1", instance="w0-2")
    told = json.loads((await control.get()).body)
    assert (told["state"], told["handover"]) == ("serving", None)


@pytest.mark.parametrize(("method", "state"), [("POST", "serving"), ("DELETE", "drained")])
async def test_while_the_log_is_away_nothing_changes(control: Control, method: str, state: str) -> None:
    if method == "DELETE":
        await control.post(b'{"handover_tokens": 0}')
    control.log.is_away = True
    answered = await control.ask(method)
    assert (answered.status, answered.error["code"], await control.state()) == (503, "log_unavailable", state)


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_worker_that_is_not_registered_is_said(control: Control, method: str) -> None:
    answered = await control.ask(method, "/v1/workers/w9/drain")
    assert (answered.status, answered.error["param"]) == (404, "id")


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "inf", "soon", ""])
async def test_a_wait_that_may_not_be_is_named(control: Control, wait: str) -> None:
    answered = await control.get(f"?wait={wait}")
    assert (answered.status, answered.error["param"]) == (400, "wait")


async def test_an_invalid_request_drains_no_worker(control: Control) -> None:
    answered = await control.post(b'{"handover_tokens": "many"}')
    assert (answered.status, answered.error["param"]) == (400, "handover_tokens")
    assert (await control.state(), control.log.events) == ("serving", [])


# ---------------------------------------------------------------- put back


async def test_a_worker_that_was_drained_by_hand_is_put_back_and_every_router_learns_of_it(control: Control) -> None:
    await control.post(b'{"handover_tokens": 0}')
    answered = await control.put_back()
    assert answered.status == 202
    assert json.loads(answered.body)["drain"]["state"] == "serving"
    assert control.found.plane.routing.decide(route(pinned_worker="w0")).winner.worker_id == "w0"
    ended = control.log.events[-1]
    others = [replace(ended, ends_drain=False), *control.log.events]
    assert drains_after(*others) == drains_after(ended) == (False, False), "of all events, and of what the log keeps"


def drains_after(*events: FleetEvent) -> tuple[bool, bool]:
    """Return whether w0 drains, and by hand, for a router that learns of these events."""
    learnt = state()
    for event in events:
        learnt.apply(FleetApplied(now_s=0.0, event=event))
    worker = learnt.fleet.worker("w0")
    assert worker is not None
    return worker.draining, worker.drained_by_hand


async def test_a_router_that_starts_later_learns_of_a_drain_by_the_registration_and_can_end_it(
    control: Control,
) -> None:
    own = control.found.w0
    again = replace(own, drained=True)
    control.found.plane.routing.apply(FleetApplied(now_s=0.0, event=again))
    assert await control.state() == "drained"
    assert (await control.put_back()).status == 202
    assert await control.state() == "serving"
    ended = replace(own, ends_drain=True)
    assert control.log.events[-1] == ended
    assert drains_after(again) == (True, True)
    assert drains_after(again, ended, replace(own, instance="w0-2"))[0] is False, "a drain belongs to the instance"


async def test_a_worker_that_serves_is_put_back_without_an_event(control: Control) -> None:
    answered = await control.put_back()
    assert (answered.status, json.loads(answered.body)["published"], control.log.events) == (200, None, [])


@pytest.mark.parametrize("by_hand_before", [False, True])
async def test_a_worker_that_is_stopping_is_not_put_back(control: Control, by_hand_before: bool) -> None:
    if by_hand_before:
        await control.post(b'{"handover_tokens": 0}')
    stopping = WorkerDraining(worker_id="w0", instance="w0-1")
    control.found.plane.routing.apply(FleetApplied(now_s=NOW_S, event=stopping))
    before = list(control.log.events)
    answered = await control.put_back()
    assert (answered.status, answered.error["code"]) == (409, "agent_stops")
    assert answered.error["message"] == "w0 cannot be put back: its agent is stopping; start the agent again"
    await control.post(b'{"handover_tokens": 0}')
    assert (await control.put_back()).status == 409, "nor after an operator drained it, too"
    assert control.log.events[len(before) :] == [WorkerDraining(worker_id="w0", instance="w0-1", by_hand=True)]


async def test_a_drain_outlives_a_registration_of_the_agent(control: Control) -> None:
    await control.post(b'{"handover_tokens": 0}')
    control.found.plane.routing.apply(FleetApplied(now_s=NOW_S, event=control.found.w0))
    assert await control.state() == "drained"


async def test_a_hand_over_ends_when_its_worker_is_put_back(control: Control) -> None:
    lease = control.running()
    await control.post()
    await until(lambda: control.found.status().state == "waiting")
    await control.put_back()
    await until(lambda: control.found.status().state == "over")
    assert control.found.status().reason == "the worker was put back"
    assert await control.state() == "serving"
    lease.end("ok")
