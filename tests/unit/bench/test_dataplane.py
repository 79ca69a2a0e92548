"""The data plane bench: its workers and clients against each other, and what it makes of figures."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.dataplane.backend import BackendConnection, CutStream
from bench.dataplane.command import dataplane
from bench.dataplane.load import LoadRole
from bench.dataplane.report import DataplaneFacts, as_json, tables, verdict_table
from bench.dataplane.run import (
    BURST,
    CRAWLED,
    HELD,
    HIGH_RATE,
    IDLE,
    LARGE,
    LEFT,
    PACED,
    SMALL,
    Bench,
    DataplaneResults,
    MeasuredShape,
)
from bench.dataplane.systems import (
    CACHE,
    DIRECT,
    KV,
    NGINX,
    OURS,
    ROUND_ROBIN,
    UNSAMPLED,
    Backend,
    SystemAbsent,
    SystemPlan,
    found,
    start,
)
from bench.dataplane.verdicts import verdicts
from bench.dataplane.wire import (
    CHUNK,
    END_EVENTS,
    JSON_ANSWER,
    STREAM_END,
    STREAM_HEAD,
    AnswerInvalid,
    AnswerReader,
    requests,
)
from bench.events.child import Answer
from bench.events.run import Child

SHAPE = MeasuredShape(rounds=1, seconds=1.0, rate=200.0, streams=10, crawl_s=1.0, cores=(-1, -1))
_STREAM = STREAM_HEAD + 3 * CHUNK + STREAM_END


@asynccontextmanager
async def worker(lost: list[CutStream]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(lambda: BackendConnection(lost), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def asked(word: str, lost: list[CutStream] | None = None, **told: float) -> Answer:
    async def ask() -> Answer:
        async with worker([] if lost is None else lost) as port:
            return await LoadRole().commands[word](port=port, **told)

    return asyncio.run(ask())


def test_a_stream_is_read_whole_wherever_it_is_cut() -> None:
    for cut in range(1, len(_STREAM)):
        reader = AnswerReader()
        assert [reader.feed(_STREAM[:cut]), reader.feed(_STREAM[cut:])] == [False, True], cut
        assert (reader.status, reader.events) == (200, 3 + END_EVENTS), cut


def test_a_whole_answer_is_read_wherever_it_is_cut() -> None:
    for cut in range(1, len(JSON_ANSWER)):
        reader = AnswerReader()
        assert [reader.feed(JSON_ANSWER[:cut]), reader.feed(JSON_ANSWER[cut:])] == [False, True], cut


def test_an_answer_without_a_length_is_refused() -> None:
    with pytest.raises(AnswerInvalid):
        AnswerReader().feed(b"HTTP/1.1 200 OK\r\n\r\nbody")


@pytest.mark.parametrize("size", [300, 40_000])
def test_a_request_has_the_size_and_the_length_that_it_says(size: int) -> None:
    head, _, body = requests("h", size, chunks=4, pause_ms=5).numbered(17).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert len(body) == size
    told = json.loads(body)
    assert (told["stream"], told["max_tokens"], told["seed"]) == (True, 4, 5)
    assert told["messages"][0]["content"].startswith("00000017 ")


def test_saturated_workers_answer_every_request() -> None:
    answer = asked("saturate", body_bytes=300, connections=3, seconds=0.05)
    assert (answer["errors"], answer["requests"] >= 3) == (0, True)


def test_every_chunk_of_a_stream_is_counted() -> None:
    answer = asked("saturate", body_bytes=300, connections=2, seconds=0.01, chunks=7)
    assert answer["events"] == answer["requests"] * (7 + END_EVENTS)


def test_a_paced_run_has_as_many_latencies_as_requests() -> None:
    answer = asked("pace", body_bytes=300, rate=500, seconds=0.1)
    assert (len(answer["latencies_us"]), answer["errors"]) == (50, 0)


def test_streams_held_at_once_are_whole() -> None:
    answer = asked("hold", streams=20, chunks=3, pause_ms=10, ramp_s=0.01)
    assert (answer["errors"], answer["missing"]) == (0, 0)


def test_a_client_that_leaves_is_seen_to_by_the_worker() -> None:
    lost: list[CutStream] = []
    answer = asked("leave", lost, times=2, pause_ms=50)
    assert [each.pause_ms for each in lost] == [50, 50]
    assert all(each.at_ns > left for each, left in zip(lost, answer["left_ns"], strict=True))


def test_a_worker_that_cuts_its_answers_makes_errors() -> None:
    class Cutting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            del data
            assert isinstance(self.transport, asyncio.WriteTransport)
            self.transport.write(STREAM_HEAD + CHUNK)
            self.transport.close()

    async def ask() -> Answer:
        async with await asyncio.get_running_loop().create_server(Cutting, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await LoadRole().commands["hold"](port=port, streams=3, chunks=2, pause_ms=1, ramp_s=0.01)

    answer = asyncio.run(ask())
    assert (answer["errors"], answer["missing"]) == (3, 3 * (1 + END_EVENTS))


def test_the_workers_tell_their_ports_and_what_they_lost() -> None:
    async def ask() -> tuple[int, Answer]:
        child = await Child.start("dataplane.backend", {})
        try:
            return len(set(child.started["ports"])), await child.call("lost", pause_ms=1)
        finally:
            await child.close()

    assert asyncio.run(ask()) == (2, {"lost_ns": []})


def test_peers_are_those_that_are_named_or_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = tmp_path / "my-peer"
    peer.write_text("#!/bin/sh\n")
    peer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    plans, absent = found([("smg", str(peer))])
    assert [plan.name for plan in plans if plan.kind == "smg"] == ["smg, round robin", "smg, cache-aware"]
    assert any(line.startswith("vllm-router: absent") for line in absent)


def test_a_system_that_does_not_start_is_absent_with_what_it_said(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no licence; exit 3\n")
    broken.chmod(0o755)

    async def begin() -> None:
        backend = await Child.start("dataplane.backend", {})
        try:
            async with asyncio.TaskGroup() as group:
                plan = SystemPlan("smg", ROUND_ROBIN, str(broken))
                with pytest.raises(SystemAbsent, match="no licence"):
                    await start(plan, Backend(backend, backend.started["ports"]), (-1, -1), tmp_path, group)
        finally:
            await backend.close()

    asyncio.run(begin())


SMALL_PLAIN = "CPU of a small request (router, round robin), over the best peer's, round robin"
SMALL_AWARE = "CPU of a small request (router, kv), over the best peer's, cache-aware"


def measured(cpu_us: dict[str, float], *, more_mib: float = 0.5) -> DataplaneResults:
    results = DataplaneResults()
    results.systems = [
        SystemPlan(DIRECT, ""),
        SystemPlan(OURS, ROUND_ROBIN),
        SystemPlan(NGINX, ""),
        SystemPlan("smg", ROUND_ROBIN),
    ]
    for plan in results.systems:
        us = cpu_us.get(plan.kind, 1.0)
        for cell in (SMALL, LARGE, PACED, BURST, HIGH_RATE):
            figures = {"cpu_us": us, "errors": 0.0, "rate": 1.0, "rss_mib": 9.0, "p50_us": us, "p99_us": 2 * us}
            results.rounds[plan.name, cell].append(figures)
        held = {"errors": 0.0, "missing": 0.0, "at_once": 10.0, "streams": 10.0, "rss_most_mib": 9.0}
        results.rounds[plan.name, HELD].append(held)
        results.rounds[plan.name, CRAWLED].append({"rss_more_mib": more_mib})
        results.rounds[plan.name, LEFT].append({"p50_ms": 1.0, "worst_ms": 2.0, "unseen": 0.0})
        results.rounds[plan.name, IDLE].append({"cpu_ms_a_second": 1.0})
    return results


def test_targets_are_judged_against_the_best_peer() -> None:
    results = measured({OURS: 20.0, NGINX: 14.0, "smg": 40.0, DIRECT: 1.0})
    held = {each.target: (each.measured, each.holds) for each in verdicts(results)}
    assert held[SMALL_PLAIN] == (0.5, True)
    assert held["CPU of a chunk, high rate, over the best peer's"] == (0.5, True)
    assert held["latency added at a modest rate, p50, over the best peer's"] == (19 / 39, True)
    assert held["memory for a reader that does not read (router, round robin)"] == (0.5, True)
    assert held["memory for a reader that does not read (router, kv)"] == (None, None)


def test_each_mode_is_judged_beside_the_peers_of_its_kind() -> None:
    results = measured({OURS: 30.0, "smg": 40.0})
    for plan, cpu_us in ((SystemPlan(OURS, KV), 90.0), (SystemPlan("smg", CACHE), 60.0)):
        results.systems.append(plan)
        results.rounds[plan.name, SMALL].append({"cpu_us": cpu_us})
    held = {each.target: (each.measured, each.holds, each.told) for each in verdicts(results)}
    assert held[SMALL_PLAIN] == (0.75, True, "against smg, round robin")
    assert held[SMALL_AWARE] == (1.5, False, "against smg, cache-aware")


@pytest.mark.planted
def test_a_planted_slow_router_misses_and_a_planted_fast_one_fails_the_control() -> None:
    slow = {each.target: each.holds for each in verdicts(measured({OURS: 50.0, NGINX: 14.0, "smg": 40.0}))}
    assert slow[SMALL_PLAIN] is False
    fast = {each.target: each.holds for each in verdicts(measured({OURS: 2.0, NGINX: 14.0, "smg": 40.0}))}
    assert fast["control: CPU of a small request, the least of all proxies over nginx's"] is False


def test_without_peers_targets_that_need_one_are_not_measured() -> None:
    results = measured({OURS: 20.0})
    results.systems = results.systems[:2]
    rows = {row[0]: row[-1] for row in verdict_table(results).rows}
    assert rows[SMALL_PLAIN] == rows[SMALL_AWARE] == "not measured"


@pytest.mark.parametrize(("unsampled_us", "holds"), [(104.5, True), (105.5, False)])
def test_tracing_is_judged_by_what_it_adds_to_the_same_router(unsampled_us: float, *, holds: bool) -> None:
    results = measured({OURS: 20.0})
    for plan, cpu_us in ((SystemPlan(OURS, KV), 100.0), (UNSAMPLED, unsampled_us)):
        results.systems.append(plan)
        results.rounds[plan.name, SMALL] = [{"cpu_us": cpu_us}, {"cpu_us": 900.0}, {"cpu_us": cpu_us}]
    found = {each.target: each for each in verdicts(results)}
    added = found["CPU that tracing adds to a small request, unsampled"]
    assert (added.measured, added.holds) == (unsampled_us - 100.0, holds)


def test_the_tables_and_the_json_have_every_system() -> None:
    results = measured({OURS: 20.0, NGINX: 14.0, "smg": 40.0})
    facts = DataplaneFacts("a machine", "abc", SHAPE, is_quick=True)
    names = [plan.name for plan in results.systems]
    assert [row[0] for row in tables(results)[1].rows] == names
    assert {each["system"] for each in json.loads(as_json(facts, results))["cells"]} == set(names)
    assert next(facts.lines(results)) == "a machine; not pinned to cores"


def test_an_unknown_peer_is_refused_by_name() -> None:
    result = CliRunner().invoke(dataplane, ["--peer", "haproxy=/bin/true"])
    assert result.exit_code == 2
    assert "found 'haproxy=/bin/true'" in result.output


def test_the_bench_starts_its_workers_and_its_clients() -> None:
    async def begun() -> int:
        async with Bench(SHAPE) as bench:
            return bench.steps

    assert asyncio.run(begun()) == 0
