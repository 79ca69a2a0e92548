"""Every finding of the catalogue is provoked by one fault and not by its near miss; a healthy fleet has none."""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kv_protocol.images import FixedTokens, ImageRule
from kv_protocol.subjects import EVENTS_STREAM
from router.doctor.catalogue import CATALOGUE
from router.doctor.clocks import ClockReading
from router.doctor.event_checks import SILENT_BLOCKS
from router.doctor.examination import examine, exit_code
from router.doctor.facts import AddressAnswer, FleetFacts, LoadSeen, LogSeen, ParityBroken
from router.doctor.findings import Finding
from router.doctor.parity_checks import AGREED
from router.fleet.trust import PARITY_FIELDS
from tests.unit.router.doctor_facts import (
    DATA,
    LOG,
    METRICS,
    ROUTER,
    STREAM,
    facts,
    head,
    lasting,
    pair,
    router,
    seen,
    standing,
    told,
    with_events_stream,
    with_heads,
    with_http,
    with_metric,
    with_router,
)
from tests.unit.router.samples import rank

IMAGES = ImageRule(placeholder="<img>", image_token_id=7, tokens=FixedTokens(4))
REFUSED = "Connection refused"
OTHER = {"worker_id": "w0", "instance": "w0-2"}


class Case(NamedTuple):
    """What causes a finding, its subject, what is found; and a near miss."""

    fault: FleetFacts
    of: str
    found: str
    near_miss: FleetFacts = facts()


def differing(field: str, *values: object) -> FleetFacts:
    return facts(told("w0", **{field: values[0]}), told("w1", **{field: values[1]}))


def by_router(field: str, allowed: str, found: str = "") -> FleetFacts:
    """The workers agree, and their router has something else."""
    broken = tuple(ParityBroken(worker_id, field, allowed, found) for worker_id in ("w0", "w1"))
    return facts(routers=(router(broken=broken),))


def of_mode(mode: str, facts_: FleetFacts, *, reads_overlap: bool = False) -> FleetFacts:
    routers = tuple(replace(each, mode=mode, reads_overlap=reads_overlap) for each in facts_.routers)
    return replace(facts_, routers=routers)


def grown(by: float) -> FleetFacts:
    worker = seen(told("w0"))
    after = {"kvrouter_outbox_dropped_total": 3.0 + by}
    return facts(workers=(replace(worker, after=after), seen(told("w1"))))


def lagging(before: int, after: int) -> FleetFacts:
    return facts(log=replace(LOG, pending_before={"r": before}, pending_after={"r": after}))


def old_log(snapshot_s: float, messages: int = 1) -> FleetFacts:
    snapshots = replace(STREAM, newest_s=snapshot_s, messages=messages)
    return facts(log=replace(LOG, streams={EVENTS_STREAM: OLD, "OBJ_KV_SNAPSHOTS": snapshots}))


OLD = replace(STREAM, oldest_s=3500.0)


def engines(*versions: str) -> FleetFacts:
    return facts(*(told(f"w{number}", version=version) for number, version in enumerate(versions)))


CASES: dict[str, Case] = {
    # ------------------------------------------------------------ the log
    "log.unreachable": Case(facts(log=LogSeen(problem="nats.url: refused"), heads=()), "the log", "nats.url: refused"),
    "log.no_stream": Case(
        facts(log=replace(LOG, missing=("KV_EVENTS",))), "KV_EVENTS", "there is no such stream"
    ),
    "log.full": Case(
        with_events_stream(bytes=9000), EVENTS_STREAM, "9000 of 10000 bytes", with_events_stream(bytes=8999)
    ),
    "log.uncovered": Case(old_log(1801.0), EVENTS_STREAM, "the newest snapshot is 1801 s old", old_log(1799.0)),
    "log.storage": Case(with_events_stream(storage="memory"), EVENTS_STREAM, "storage memory"),
    "log.store": Case(
        facts(log=replace(LOG, store_bytes=90, store_bytes_max=100)), "the log", "90 of 100 bytes",
        facts(log=replace(LOG, store_bytes=90, store_bytes_max=0)),
    ),
    "log.lag": Case(lagging(10_000, 10_000), "reader r", "3.0 s later 10000", lagging(10_000, 9_999)),
    "log.replicas": Case(with_events_stream(replicas=1), EVENTS_STREAM, "replicas 1"),
    # ------------------------------------------------------------ the fleet
    "fleet.empty": Case(
        facts(workers=(), heads=(), left={"w9": "done"}), "the fleet", "no worker is registered; 1 left",
        facts(workers=(), heads=(), draining=("w0",)),
    ),
    "fleet.unreadable": Case(facts(refused=("kv.v1.fleet.m.w0: malformed",)), "the log", "kv.v1.fleet.m.w0: malformed"),
    "worker.silent": Case(with_heads(), "w0", "no heartbeat in 3.0 s; its HTTP answers"),
    "worker.gone": Case(
        facts(workers=(seen(told("w0"), problem=REFUSED), seen(told("w1"))), heads=(head("w1/0"),)),
        "w0", "no heartbeat in 3.0 s, and Connection refused",
    ),
    "worker.unreachable": Case(with_http(problem=REFUSED), "w0", "Connection refused"),
    "worker.unhealthy": Case(with_http(is_well=False, reason="the engine died"), "w0", "the engine died"),
    "worker.draining": Case(facts(draining=("w2",)), "w2", "it takes no new work"),
    "worker.withdrawn": Case(
        facts(left={"w2": "its /health does not answer"}, heads=(*facts().heads, head("w2/0"))),
        "w2", "it beats, and left: its /health does not answer",
        facts(left={"w2": "its /health does not answer"}),
    ),
    "worker.two_instances": Case(
        with_heads(head(), head(instance="w0-2", epoch=2)), "w0/0", "w0-1 and w0-2 beat at the same time",
        with_heads(head(instance="w0-0", epoch=9, first_s=0.1, last_s=1.1), head(first_s=1.5)),
    ),
    "worker.one_address": Case(
        facts(told("w0", base_url="http://h:1"), told("w1", base_url="http://H:1/")), "w0, w1", "all are at http://h:1",
        facts(told("w0", base_url="http://h:1"), told("w1", base_url="http://h:2")),
    ),
    "worker.one_endpoint": Case(
        pair(endpoint="a.b.c"), "a.b.c", "decode: w1; prefill: w0",
        facts(told("w0", endpoint="a.b.c"), told("w1", endpoint="a.b.c")),
    ),
    "worker.open": Case(with_http(is_open=True), told("w0").base_url, "answers without a token"),
    "rank.silent": Case(
        facts(told("w0", dp_ranks=(0, 1)), told("w1"), heads=(head("w0/0"), head("w1/0"))), "w0", "no heartbeat of w0/1"
    ),
    "rank.unregistered": Case(
        facts(heads=(*facts().heads, head("w0/1"))), "w0/1", "registered is w0-1 with ranks 0",
        facts(told("w0", dp_ranks=(0, 1)), told("w1")),
    ),
    "rank.two_heads": Case(
        with_heads(head(), head(epoch=2, first_s=0.7)), "w0/0", "epochs 1 and 2 of instance w0-1",
        with_heads(head(epoch=2, last_s=1.0), head(first_s=1.0)),
    ),
    # ------------------------------------------------------------ parity, versions
    "parity.block_size": Case(
        differing("block_size", 16, 32), "m", "16: w0; 32: w1", of_mode("round-robin", differing("block_size", 16, 32))
    ),
    "parity.hash_scheme": Case(
        differing("hash_scheme", "xxh3-1337", "other"), "m", "other: w1"
    ),
    "parity.canary": Case(differing("canary", told("w0").canary, 5), "w1", "found 5, here it is"),
    "parity.tokenizer_digest": Case(by_router("tokenizer_digest", "t-2"), "m", f"t-2: router {ROUTER}"),
    "parity.prompt_ids": Case(
        by_router("prompt_ids", "token 3: 7", "8"), "w0", "found 8, allowed token 3: 7"
    ),
    "parity.kv_events": Case(
        by_router("kv_events", "those of w0/0", "those of w1/0"), "w0", "found those of w1/0, allowed those of w0/0"
    ),
    "parity.template_digest": Case(differing("template_digest", "a", "b"), "m", "a: w0; b: w1"),
    "parity.images": Case(
        differing("images", IMAGES, None), "m", "none: w1", facts(told("w0", images=IMAGES), told("w1", images=IMAGES))
    ),
    "version.engine": Case(
        engines("1.0", "1.1"), "m", "simulated: 1.0: w0; 1.1: w1",
        facts(told("w0", version="1.1", event_source="vllm"), told("w1")),
    ),
    "version.range": Case(
        facts(*(told(each, version="1.4.0rc1", event_source="trtllm") for each in ("w0", "w1"))),
        "m", "1.4.0rc1: w0, w1; supported: 1.3.0rc0 or later, below 1.4",
        facts(*(told(each, version="1.3.0rc29", event_source="trtllm") for each in ("w0", "w1"))),
    ),
    "version.router": Case(
        facts(planes=(AddressAnswer(url=DATA, version="0.2.0"),)), "the fleet", f"0.1.0: {ROUTER}; 0.2.0: {DATA}",
        facts(planes=(AddressAnswer(url=DATA),)),
    ),
    # ------------------------------------------------------------ prefill and decode
    "pair.buffer": Case(
        pair(max_seq_len=4096, prefill={"transfer_buffer_tokens": 4094}), "w0", "4094, the longest input has 4095",
        pair(max_seq_len=4096, transfer_buffer_tokens=4095),
    ),
    "pair.dtype": Case(
        pair({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "bf16"}), "m", "prefill fp8: w0; decode bf16: w1",
        pair({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "FP8"}),
    ),
    "pair.dtype_auto": Case(
        pair({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "fp8"}), "m", "prefill auto: w0",
        pair({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": ""}),
    ),
    "pair.backend": Case(
        pair({"transfer_backend": "NIXL"}, {"transfer_backend": "UCX"}), "m", "prefill nixl: w0; decode ucx: w1",
        pair({"transfer_backend": "NIXL"}, {"transfer_backend": ""}),
    ),
    "pair.reuse": Case(
        differing("block_reuse", False, True), "w0", "block_reuse false",
        of_mode("least-loaded", differing("block_reuse", False, None)),
    ),
    "pair.prefill_alone": Case(
        facts(told("w0", role="prefill"), told("w1", role="prefill")), "m", "no worker serves the model", pair()
    ),
    "pair.decode_alone": Case(
        facts(told("w0", role="decode"), told("w1")), "m", "w0 decode, no worker prefills", pair()
    ),
    "pair.prefill_domain": Case(
        facts(
            told("w0", role="prefill", transfer_domain="a"), told("w1", role="decode", transfer_domain="a"),
            told("w2", role="prefill", transfer_domain="b"),
        ),
        "w2", "transfer_domain 'b', decode workers are in 'a'", pair(transfer_domain="a"),
    ),
    "pair.decode_domain": Case(
        facts(
            told("w0", role="prefill"), told("w1", role="decode"), told("w2", role="decode", transfer_domain="b"),
        ),
        "w2", "transfer_domain 'b', prefill workers are in ''", pair(transfer_domain="b"),
    ),
    # ------------------------------------------------------------ events
    "events.none": Case(
        differing("event_source", "none", "vllm"), "w0", "event_source none",
        pair(decode={"event_source": "none"}),
    ),
    "events.silent": Case(
        with_heads(head(last_seq=0)), "w0/0", "reports 100 blocks in use",
        facts(heads=(head(last_seq=0), head("w1/0")), loads=(LoadSeen(rank("w0/0"), 63),)),
    ),
    "events.lost": Case(grown(1), "w0", "in 3.0 s: 1 batches given up", grown(0)),
    "rank.source": Case(
        with_heads(head(stale="cannot be polled")), "w0/0", "cannot be polled",
        of_mode("random", with_heads(head(stale="cannot be polled"))),
    ),
    "rank.fallback": Case(
        lasting("FALLBACK", "no KV events heard"), "w0/0", "no KV events heard",
        with_router(ranks=(standing("w0/0", "FALLBACK", "no KV events heard"), standing("w1/0"))),
    ),
    "rank.degraded": Case(
        lasting("DEGRADED", "behind"), "w0/0", f"behind (router {ROUTER})",
        with_router(ranks=(standing("w0/0", "DEGRADED", "behind"),)),
    ),
    "stream.recoveries": Case(
        with_router(recoveries={"w0/0": 8}), "w0/0", "3 gaps, repairs and resyncs",
        with_router(recoveries={"w0/0": 7, "w9/0": 99}),
    ),
    # ------------------------------------------------------------ routers
    "router.unreachable": Case(facts(planes=(AddressAnswer(url=DATA, problem=REFUSED),)), DATA, "Connection refused"),
    "router.not_ready": Case(
        facts(planes=(AddressAnswer(url=DATA, is_well=False, reason="no worker is fit"),)), DATA, "no worker is fit"
    ),
    "router.open": Case(
        facts(routers=(router(control=AddressAnswer(url=ROUTER, is_open=True)),)), ROUTER, "answers without a token"
    ),
    "router.other_fleet": Case(
        facts(routers=(router(workers=("w7",)),)), ROUTER, "it knows w7; w0, w1 live on this log",
        facts(routers=(router(workers=("w1", "w7")),)),
    ),
    "index.full": Case(with_metric("kvrouter_index_overfull_ranks", 2), ROUTER, "2 ranks lack blocks"),
    "index.nearly_full": Case(
        with_metric("kvrouter_index_memory_bytes", 0.9 * (1 << 20)), ROUTER, "of 1048576 bytes",
        with_metric("kvrouter_index_memory_bytes", 0.89 * (1 << 20)),
    ),
    "breaker.open": Case(
        with_router(ranks=(standing(unfit="breaker open: connect"),)), "w0/0", "breaker open: connect",
        with_router(ranks=(standing(unfit="draining"),)),
    ),
    "queue.full": Case(
        with_metric("kvrouter_queued_requests", 90), ROUTER, "is 90 of 100 (queue.requests_max)",
        with_metric("kvrouter_queued_requests", 89),
    ),
    "journal.off": Case(
        with_router(metrics={"kvrouter_queued_requests": 0.0}), ROUTER, "journal.enabled is false"
    ),
    "clock.skew": Case(
        facts(clocks=(ClockReading("a", 1.1, 3.0), ClockReading("b", -0.5, 1.5))), "a", "1.1 s or more ahead of this",
        facts(clocks=(ClockReading("a", 1.0, 3.0), ClockReading("b", -0.5, 1.5))),
    ),
}  # fmt: skip


def ids(findings: list[Finding]) -> set[str]:
    return {finding.id for finding in findings}


def test_every_finding_of_the_catalogue_has_a_case() -> None:
    assert CASES.keys() == CATALOGUE.keys()


def test_every_parity_field_of_the_router_has_a_check() -> None:
    assert {*PARITY_FIELDS} == {*AGREED, "canary", "event_source"}


def test_nothing_is_found_in_a_healthy_fleet_nor_in_a_healthy_pair() -> None:
    assert examine(facts()) == []
    assert examine(pair(transfer_domain="rack", max_seq_len=100, transfer_buffer_tokens=99, kv_cache_dtype="fp8")) == []


@pytest.mark.parametrize("check", CASES)
def test_a_fault_is_found_and_nothing_else(check: str) -> None:
    case = CASES[check]
    findings = examine(case.fault)
    assert ids(findings) == {check}, findings
    assert any(each.of == case.of and case.found in each.found for each in findings), findings
    assert exit_code(findings) == {"error": 2, "warning": 1, "note": 0}[CATALOGUE[check].severity]


@pytest.mark.parametrize("check", CASES)
def test_what_comes_near_a_fault_is_not_found(check: str) -> None:
    assert check not in ids(examine(CASES[check].near_miss))


def test_the_reasons_of_refusals_while_we_looked_are_named_and_no_older_ones() -> None:
    metrics = {**METRICS, "kvrouter_rejected_total": 9.0, "kvrouter_rejected_total{timeout}": 2.0}
    before = replace(router().before, metrics={**METRICS, "kvrouter_rejected_total{timeout}": 0.0})
    (found,) = examine(facts(routers=(router(before=before, after=replace(before, metrics=metrics)),)))
    assert (found.id, found.found) == ("queue.full", "2 requests refused in 3.0 s (timeout)")


@pytest.mark.parametrize(
    "no_snapshot", [old_log(0.0, messages=0), facts(log=replace(LOG, streams={EVENTS_STREAM: OLD}))]
)
def test_an_old_log_without_any_snapshot_is_uncovered(no_snapshot: FleetFacts) -> None:
    (found,) = examine(no_snapshot)
    assert (found.id, found.found.rpartition(", ")[2]) == ("log.uncovered", "and there is no snapshot")


@pytest.mark.parametrize("unbounded", [{"bytes_max": 0}, {"age_max_s": 0.0, "oldest_s": 1e9}])
def test_a_stream_without_a_bound_never_nears_it(unbounded: dict[str, float]) -> None:
    assert examine(with_events_stream(**unbounded)) == []


def test_versions_that_are_not_said_or_of_engines_without_events_are_not_compared() -> None:
    assert examine(engines("1.0", "")) == []
    assert "version.engine" not in ids(examine(facts(*(told(f"w{v}", version=v, event_source="none") for v in "12"))))


def test_without_a_mode_that_reads_overlap_parity_matters_where_prompts_are_computed_apart() -> None:
    workers = told("w0", role="prefill"), told("w1", role="decode", block_size=32), told("w2")
    assert ids(examine(of_mode("random", facts(*workers)))) == {"parity.block_size"}
    assert examine(of_mode("random", facts(told("w0"), told("w1", block_size=32)))) == []


def test_where_no_router_answers_the_configuration_says_whether_overlap_is_read() -> None:
    fault = replace(differing("block_size", 16, 32), routers=())
    assert ids(examine(fault)) == {"parity.block_size"}
    assert examine(replace(fault, reads_overlap=False)) == []


def test_as_many_blocks_as_one_cannot_overlook_are_enough() -> None:
    fault = facts(heads=(head(last_seq=0), head("w1/0")), loads=(LoadSeen(rank("w0/0"), SILENT_BLOCKS),))
    assert ids(examine(fault)) == {"events.silent"}


def test_the_worst_comes_first_and_decides_the_exit_code() -> None:
    found = examine(
        replace(differing("block_size", 16, 32), draining=("w2",), refused=("x",), log=LogSeen(missing=("A",)))
    )
    assert [CATALOGUE[each.id].severity for each in found] == sorted(
        (CATALOGUE[each.id].severity for each in found), key=["error", "warning", "note"].index
    )
    assert exit_code(found) == 2
    assert exit_code([]) == 0
