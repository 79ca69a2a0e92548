"""The data plane bench: its workers and clients against each other, and what it makes of figures."""

import asyncio

import pytest

from bench.dataplane.backend import BackendRole
from bench.dataplane.command import verdicts
from bench.dataplane.load import EVENT, requests
from bench.dataplane.run import BURST, CRAWLED, HELD, HIGH_RATE, IDLE, LARGE, LEFT, PACED, SMALL, DataplaneResults
from bench.dataplane.systems import CACHE, DIRECT, DYNAMO, KV, OURS, ROUND_ROBIN, UNSAMPLED, SystemPlan

SMALL_PLAIN = "CPU of a small request (router, round robin), over the best peer's, round robin"
SMALL_AWARE = "CPU of a small request (router, kv), over the best peer's, cache-aware"


def measured(cpu_us: dict[str, float], *, more_mib: float = 0.5) -> DataplaneResults:
    results = DataplaneResults()
    results.systems = [
        SystemPlan(DIRECT, ""),
        SystemPlan(OURS, ROUND_ROBIN),
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


def said(results: DataplaneResults) -> dict[str, tuple[tuple[tuple[str, float], ...], bool | None]]:
    return {each.target: (each.figures, each.holds) for each in verdicts(results)}


def test_targets_are_judged_against_the_best_peer() -> None:
    results = measured({OURS: 20.0, "smg": 40.0, DIRECT: 1.0})
    held = said(results)
    assert held[SMALL_PLAIN] == ((("against smg, round robin", 0.5),), True)
    assert held["CPU of a chunk, high rate (router, round robin), over the best peer's"][1] is True
    assert held["latency added at a modest rate, p50, over the best peer's"][0] == (
        ("against smg, round robin", 19 / 39),
    )
    assert held["memory for a reader that does not read (router, round robin)"] == ((("", 0.5),), True)
    assert held["memory for a reader that does not read (router, kv)"] == ((), None)


def test_each_mode_is_judged_beside_the_peers_of_its_kind() -> None:
    results = measured({OURS: 30.0, "smg": 40.0})
    for plan, cpu_us in ((SystemPlan(OURS, KV), 90.0), (SystemPlan("smg", CACHE), 60.0)):
        results.systems.append(plan)
        results.rounds[plan.name, SMALL].append({"cpu_us": cpu_us})
    held = said(results)
    assert held[SMALL_PLAIN] == ((("against smg, round robin", 0.75),), False)
    assert held[SMALL_AWARE] == ((("against smg, cache-aware", 1.5),), False)


def test_with_a_tokenizer_it_is_judged_beside_dynamo_by_the_median_of_the_rounds() -> None:
    results = measured({OURS: 30.0, "smg": 10.0})
    tokenizing, dynamo = SystemPlan(OURS, KV, text="model"), SystemPlan(DYNAMO, KV, "python", text="model")
    results.systems += [tokenizing, dynamo]
    results.rounds[tokenizing.name, LARGE] = [{"cpu_us": us} for us in (100.0, 300.0, 700.0)]
    results.rounds[dynamo.name, LARGE] = [{"cpu_us": us} for us in (1000.0, 1000.0, 1000.0)]
    held = said(results)
    beside_dynamo = held["CPU of a request of 40 KB (router, kv, tokenizer), over Dynamo's"]
    assert beside_dynamo == ((("against dynamo, kv", 0.3),), True)


@pytest.mark.parametrize(("unsampled_us", "holds"), [(104.5, True), (105.5, False)])
def test_tracing_is_judged_by_what_it_adds_to_the_same_router(unsampled_us: float, *, holds: bool) -> None:
    results = measured({OURS: 20.0})
    for plan, cpu_us in ((SystemPlan(OURS, KV), 100.0), (UNSAMPLED, unsampled_us)):
        results.systems.append(plan)
        results.rounds[plan.name, SMALL] = [{"cpu_us": cpu_us}, {"cpu_us": 900.0}, {"cpu_us": cpu_us}]
    assert said(results)["CPU that tracing adds to a small request, unsampled"] == (
        (("", unsampled_us - 100.0),),
        holds,
    )


async def test_the_end_of_a_call_is_paired_with_its_own_client_whichever_ends_first() -> None:
    backend, cut = BackendRole(), [1002, 1001]
    (port, _) = (await backend.begin())["ports"]
    writers = {}
    for pause_ms in (1001, 1002, 1003):
        reader, writers[pause_ms] = await asyncio.open_connection("127.0.0.1", port)
        writers[pause_ms].write(requests("host", 300, chunks=9, pause_ms=pause_ms).numbered(1))
        await reader.readuntil(EVENT)
    for pause_ms in cut:
        writers[pause_ms].close()
        await writers[pause_ms].wait_closed()
        await asyncio.sleep(0.05)
    assert [pause_ms for pause_ms, _ in (await backend.lost())["lost"]] == cut
    writers[1003].close()
    await backend.end()
