"""Every finding of the catalogue is provoked by one fault and not by its near miss; a healthy fleet has none."""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.subjects import EVENTS_STREAM
from router.doctor.checks import PARITY, SILENT_BLOCKS, examine, exit_code
from router.doctor.facts import CATALOGUE, AddressAnswer, Differs, Finding, FleetFacts
from router.fleet.trust import PARITY_FIELDS
from tests.unit.router.doctor_facts import (
    DATA,
    ROUTER,
    facts,
    head,
    lasting,
    listed,
    pair,
    router,
    seen,
    standing,
    told,
    with_heads,
    with_http,
    with_log,
    with_router,
)
from tests.unit.router.samples import rank

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


def by_router(field: str, allowed: str | int, found: str | int, *workers: WorkerRegistered) -> FleetFacts:
    """Both workers differ from their router in this field."""
    both = listed(standing("w0/0"), standing("w1/0"), differs=Differs(field, allowed, found))
    return facts(*workers, routers=(router(before=both, after=both),))


def of_mode(mode: str, facts_: FleetFacts, *, reads_overlap: bool = False) -> FleetFacts:
    routers = tuple(replace(each, mode=mode, reads_overlap=reads_overlap) for each in facts_.routers)
    return replace(facts_, routers=routers)


CASES: dict[str, list[Case]] = {
    # ------------------------------------------------------------ the log
    "log.unreachable": [
        Case(facts(log_problem="nats.url: refused", heads=()), "the log", "nats.url: refused")
    ],
    "log.full": [
        Case(with_log(EVENTS_STREAM, 9000, 10_000), EVENTS_STREAM, "9000 of 10000 bytes",
             with_log(EVENTS_STREAM, 8999, 10_000)),
        Case(with_log("the store", 90, 100), "the store", "90 of 100 bytes", with_log("the store", 90, 0)),
    ],
    # ------------------------------------------------------------ the fleet
    "fleet.empty": [
        Case(facts(workers=(), heads=(), left={"w9": "done"}, draining=2, refused="kv.v1.fleet.m.w0: no signature"),
             "the fleet", "no worker is registered; 1 left, 2 drain; refused: kv.v1.fleet.m.w0: no signature"),
        Case(facts(told("w0", role="prefill"), told("w1", role="prefill")), "m", "w0, w1 prefill, no worker decodes",
             pair()),
    ],
    "worker.silent": [
        Case(with_heads(), "w0", "no heartbeat of w0/0 in 3.0 s; its HTTP says that all is well"),
        Case(facts(workers=(seen(told("w0"), problem=REFUSED), seen(told("w1"))), heads=(head("w1/0"),)),
             "w0", "no heartbeat of w0/0 in 3.0 s; its HTTP says Connection refused"),
        Case(facts(told("w0", dp_ranks=(0, 1)), told("w1"), heads=(head("w0/0"), head("w1/0"))), "w0",
             "no heartbeat of w0/1"),
    ],
    "worker.unhealthy": [
        Case(with_http(problem=REFUSED), "w0", "Connection refused"),
        Case(with_http(reason="the engine died"), "w0", "the engine died"),
    ],
    "worker.withdrawn": [
        Case(facts(left={"w2": "its /health does not answer"}, heads=(*facts().heads, head("w2/0"))),
             "w2", "it beats, and left: its /health does not answer",
             facts(left={"w2": "its /health does not answer"})),
    ],
    "worker.doubled": [
        Case(with_heads(head(), head(instance="w0-2", epoch=2)), "w0/0", "w0-1 and w0-2 beat at the same time",
             with_heads(head(instance="w0-0", epoch=9, first_s=0.1, last_s=1.1), head(first_s=1.5))),
        Case(with_heads(head(), head(epoch=2, first_s=0.7)), "w0/0", "epochs 1 and 2 of instance w0-1",
             with_heads(head(epoch=2, last_s=1.0), head(first_s=1.0))),
        Case(facts(told("w0", base_url="http://h:1"), told("w1", base_url="http://H:1/")), "w0, w1",
             "all are at http://h:1", facts(told("w0", base_url="http://h:1"), told("w1", base_url="http://h:2"))),
    ],
    # ------------------------------------------------------------ parity
    "parity.hashes": [
        Case(by_router("block_size", 16, 32), "w1", f"block_size: found 32, allowed 16 (router {ROUTER})",
             of_mode("round-robin", by_router("block_size", 16, 32))),
        *(Case(by_router(field, "a", "b"), "w0", f"{field}: found b") for field in
          ("hash_scheme", "canary", "images")),
    ],
    "parity.tokens": [
        *(Case(by_router(field, "a", "b"), "w0", f"{field}: found b") for field in
          ("tokenizer_digest", "template_digest", "prompt_ids")),
    ],
    "parity.kv_events": [
        Case(by_router("kv_events", "those of w0/0", "those of w1/0"), "w0",
             "found those of w1/0, allowed those of w0/0"),
    ],
    # ------------------------------------------------------------ prefill and decode
    "pair.transfer": [
        Case(pair(max_seq_len=4096, prefill={"transfer_buffer_tokens": 4094}), "w0",
             "4094, the longest input has 4095", pair(max_seq_len=4096, transfer_buffer_tokens=4095)),
        Case(pair({"transfer_backend": "NIXL"}, {"transfer_backend": "UCX"}), "m", "prefill nixl: w0; decode ucx: w1",
             pair({"transfer_backend": "NIXL"}, {"transfer_backend": ""})),
    ],
    "pair.dtype": [
        Case(pair({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "bf16"}), "m",
             "kv_cache_dtype: prefill fp8: w0; decode bf16: w1",
             pair({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "FP8"})),
    ],
    "pair.alone": [
        Case(facts(told("w0", role="decode"), told("w1")), "m", "w0 decode, no worker prefills", pair()),
        Case(facts(told("w0", role="prefill"), told("w1")), "m", "w0 prefill, no worker decodes", pair()),
        Case(
            facts(
                told("w0", role="prefill", transfer_domain="a"), told("w1", role="decode", transfer_domain="a"),
                told("w2", role="prefill", transfer_domain="b"),
            ),
            "w2", "transfer_domain 'b', decode workers are in 'a'", pair(transfer_domain="a"),
        ),
        Case(
            facts(
                told("w0", role="prefill"), told("w1", role="decode"), told("w2", role="decode", transfer_domain="b"),
            ),
            "w2", "transfer_domain 'b', prefill workers are in ''", pair(transfer_domain="b"),
        ),
    ],
    # ------------------------------------------------------------ events
    "events.none": [
        Case(differing("event_source", "none", "vllm"), "w0", "event_source none",
             pair(decode={"event_source": "none", "block_reuse": False})),
        Case(differing("block_reuse", False, True), "w0", "block_reuse false",
             of_mode("least-loaded", differing("block_reuse", False, None))),
        Case(with_heads(head(last_seq=0)), "w0/0", "reports 100 blocks in use",
             facts(heads=(head(last_seq=0), head("w1/0")), used_blocks={rank("w0/0"): 63})),
    ],
    "rank.untrusted": [
        Case(lasting("FALLBACK", "no KV events heard"), "w0/0", "FALLBACK: no KV events heard",
             with_router(standing("w0/0", "FALLBACK", "no KV events heard"), standing("w1/0"))),
        Case(lasting("DEGRADED", "behind"), "w0/0", f"DEGRADED: behind (router {ROUTER})",
             of_mode("random", lasting("DEGRADED", "behind"))),
    ],
    # ------------------------------------------------------------ routers
    "router.not_ready": [
        Case(facts(planes=(AddressAnswer(url=DATA, problem=REFUSED),)), DATA, "Connection refused"),
        Case(facts(planes=(AddressAnswer(url=DATA, reason="no worker is fit"),)), DATA, "no worker is fit"),
    ],
    "router.other_fleet": [
        Case(facts(routers=(router(standing("w7/0")),)), ROUTER, "the router knows w7, but on this log live w0, w1",
             facts(routers=(router(standing("w1/0"), standing("w7/0")),))),
    ],
    "breaker.open": [
        Case(with_router(standing(unfit="breaker open: connect")), "w0/0", "breaker open: connect",
             with_router(standing(unfit="draining"))),
    ],
}  # fmt: skip
EVERY = [pytest.param(check, case, id=f"{check} {case.found}") for check, cases in CASES.items() for case in cases]


def ids(findings: list[Finding]) -> set[str]:
    return {finding.id for finding in findings}


def test_every_finding_of_the_catalogue_has_a_case() -> None:
    assert CASES.keys() == CATALOGUE.keys()


def test_every_parity_field_of_the_router_has_a_check() -> None:
    assert {*PARITY_FIELDS} - {"event_source"} == PARITY.keys() - {"prompt_ids", "kv_events"}


def test_nothing_is_found_in_a_healthy_fleet_nor_in_a_healthy_pair() -> None:
    assert examine(facts()) == []
    assert examine(pair(transfer_domain="rack", max_seq_len=100, transfer_buffer_tokens=99, kv_cache_dtype="fp8")) == []


@pytest.mark.parametrize(("check", "case"), EVERY)
def test_a_fault_is_found_and_nothing_else(check: str, case: Case) -> None:
    findings = examine(case.fault)
    assert ids(findings) == {check}, findings
    assert any(each.of == case.of and case.found in each.found for each in findings), findings
    assert exit_code(findings) == {"error": 2, "warning": 1}[CATALOGUE[check].severity]


@pytest.mark.parametrize(("check", "case"), EVERY)
def test_what_comes_near_a_fault_is_not_found(check: str, case: Case) -> None:
    assert check not in ids(examine(case.near_miss))


def test_without_a_mode_that_reads_overlap_parity_matters_where_prompts_are_computed_apart() -> None:
    workers = told("w0", role="prefill"), told("w1", role="decode"), told("w2")
    assert ids(examine(of_mode("random", by_router("block_size", 16, 32, *workers)))) == {"parity.hashes"}
    assert examine(of_mode("random", by_router("block_size", 16, 32))) == []


def test_what_several_routers_say_of_a_worker_is_one_finding_that_names_them() -> None:
    fault = by_router("block_size", 16, 32)
    (one,) = fault.routers
    other = replace(one, control=replace(one.control, url="http://r2:8001"))
    found = examine(replace(fault, routers=(one, other)))
    words = f"block_size: found 32, allowed 16 (router {ROUTER}, http://r2:8001)"
    assert [(each.of, each.found) for each in found if each.id == "parity.hashes"] == [("w0", words), ("w1", words)]


def test_an_encode_worker_needs_no_parity() -> None:
    found = examine(by_router("tokenizer_digest", "a", "b", told("w0", role="encode"), told("w1")))
    assert [(each.id, each.of) for each in found] == [("parity.tokens", "w1")]


def test_where_no_router_answers_the_configuration_says_whether_overlap_is_read() -> None:
    fault = replace(differing("event_source", "none", "vllm"), routers=())
    assert ids(examine(fault)) == {"events.none"}
    assert examine(replace(fault, reads_overlap=False)) == []


def test_as_many_blocks_as_one_cannot_overlook_are_enough() -> None:
    fault = facts(heads=(head(last_seq=0), head("w1/0")), used_blocks={rank("w0/0"): SILENT_BLOCKS})
    assert ids(examine(fault)) == {"events.none"}


def test_the_worst_comes_first_and_decides_the_exit_code() -> None:
    found = examine(replace(by_router("block_size", 16, 32), left={"w1": ""}, fills={"A": (1, 1)}))
    assert [CATALOGUE[each.id].severity for each in found] == sorted(
        (CATALOGUE[each.id].severity for each in found), key=["error", "warning"].index
    )
    assert exit_code(found) == 2
    assert exit_code([]) == 0
