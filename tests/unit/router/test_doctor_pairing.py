"""Workers that go together, pages that the doctor reads, and the flags that its document names."""

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.fleet import WorkerRegistered
from router.cli.doctor import doctor
from router.doctor.checks import pairing_findings
from router.doctor.facts import Differs, RankStatus, Workers
from router.doctor.pages import PageUnreadable, PolicyPage, decoded, unhealthy
from router.doctor.survey import reads_overlap
from tests.support.paths import ROOT
from tests.unit.router.doctor_facts import told
from tests.unit.router.samples import registered

DOCUMENT = (ROOT / "docs" / "DOCTOR.md").read_text()
LENGTHS = st.integers(0, 6)


def prefill(worker_id: str = "p", **changed: object) -> WorkerRegistered:
    return told(worker_id, role="prefill", **changed)


def decode(worker_id: str = "d", **changed: object) -> WorkerRegistered:
    return told(worker_id, role="decode", **changed)


def found(*registrations: WorkerRegistered) -> list[tuple[str, str]]:
    return [(each.id, each.of) for each in pairing_findings(registrations)]


@given(st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), LENGTHS, LENGTHS), max_size=5))
def test_a_buffer_is_found_exactly_where_some_prompt_that_is_admitted_does_not_fit(
    shapes: list[tuple[str, int, int]],
) -> None:
    every = [
        told(f"w{number}", role=role, max_seq_len=length, transfer_buffer_tokens=buffer)
        for number, (role, length, buffer) in enumerate(shapes)
    ]
    blamed = {of for check, of in found(*every) if check == "pair.transfer"}
    assert blamed == {worker.worker_id for worker in every if deadlocks(worker, every)}


def deadlocks(worker: WorkerRegistered, every: list[WorkerRegistered]) -> bool:
    """Whether a prompt of 1..20 tokens that it and a partner admit is longer than its buffer; 0 says nothing."""
    if not worker.transfer_buffer_tokens:
        return False
    others = [each.max_seq_len for each in every if each.role != worker.role]
    theirs = max(others, default=0) if all(others) else 0
    if not worker.max_seq_len and not theirs:
        return False
    bounds = [length for length in (worker.max_seq_len, theirs) if length]
    return any(
        prompt > worker.transfer_buffer_tokens and all(prompt + 1 <= bound for bound in bounds)
        for prompt in range(1, 20)
    )


def test_other_values_that_workers_do_not_state_cause_no_finding() -> None:
    assert found(prefill(), decode()) == []
    assert found() == []


def test_an_aggregated_worker_transfers_nothing() -> None:
    assert found(told("a", max_seq_len=100, transfer_buffer_tokens=1, kv_cache_dtype="fp8"), prefill()) == []


def test_one_finding_names_all_whose_dtypes_are_apart() -> None:
    every = prefill("p1", kv_cache_dtype="fp8"), prefill("p2", kv_cache_dtype="bf16"), decode(kv_cache_dtype="fp8")
    (finding,) = pairing_findings(every)
    assert (finding.id, finding.found) == (
        "pair.dtype",
        "kv_cache_dtype: prefill fp8: p1; prefill bf16: p2; decode fp8: d",
    )


def test_an_unknown_dtype_is_found_also_where_both_are() -> None:
    (finding,) = pairing_findings([prefill(kv_cache_dtype="auto"), decode(kv_cache_dtype="")])
    assert (finding.id, finding.found) == ("pair.dtype", "kv_cache_dtype: prefill unknown: p; decode unknown: d")


def test_workers_are_read_with_their_ranks_and_differences() -> None:
    body = msgspec.json.encode(
        {
            "workers": [
                {
                    "registration": registered("w0"),
                    "ranks": [{"worker_id": "w0", "dp_rank": 0, "trust": "FALLBACK", "trust_reason": "r", "unfit": ""}],
                    "differs": [{"field": "block_size", "found": 32, "allowed": 16}],
                    "of_a_newer_version": 1,
                }
            ]
        }
    )
    workers = decoded(body, Workers, "/v1/workers")
    assert workers.ranks() == [RankStatus("w0", 0, "FALLBACK", "r", "")]
    assert workers.workers[0].differs == [Differs("block_size", 16, 32)]


def test_a_page_that_is_another_says_of_what_and_why() -> None:
    with pytest.raises(PageUnreadable, match=r"/v1/workers: .*workers"):
        decoded(b'{"data": []}', Workers, "/v1/workers")


def test_foreign_engines_may_say_anything() -> None:
    pages = (b"<html>", b"[1]", b'{"status": "failed", "reason": "dead"}')
    assert [*map(unhealthy, pages)] == ["", "", "dead"]


def test_a_mode_of_any_phase_counts_and_a_user_s_is_assumed_to_read_overlap() -> None:
    policy = decoded(
        b'{"mode": "random", "prefill": {"mode": "kv"}, "decode": {"mode": null}}', PolicyPage, "/v1/policy"
    )
    assert policy.modes() == ["random", "kv"]
    assert [reads_overlap(mode) for mode in ("kv", "round-robin", "direct", "mine:mode")] == [True, False, False, True]


def test_every_flag_is_named() -> None:
    flags = {name for option in doctor.params if isinstance(option, click.Option) for name in option.opts}
    assert {flag for flag in flags if f"`{flag}`" not in DOCUMENT} == set()
