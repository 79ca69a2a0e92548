"""What prefill and decode workers have to agree in, as it is asked of registrations alone."""

from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.fleet import WorkerRegistered
from router.doctor.pairing import pairing_findings
from tests.unit.router.doctor_facts import told

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
