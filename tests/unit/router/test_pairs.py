"""Which decode workers cannot take which prefill worker's KV blocks, as workers come and go."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.fleet import WorkerDraining, WorkerLeft
from kv_protocol.hashing import HASH_SCHEME
from kv_protocol.journal import FleetApplied
from router.decision.eligibility import NoEligibleWorker, exclusions
from router.decision.policy import Policy
from router.fleet.registry import misfit
from tests.support.decide import decide
from tests.unit.router.samples import joined, rank, registered, route, row, state, view

PREFILL = {"kv_cache_dtype": "fp8", "transfer_backend": "NIXL"}
DTYPES, BACKENDS, SIZES = ("", "auto", "fp8", "FP8", "bfloat16"), ("", "NIXL", "UCX"), (16, 32)
ROLES = ("aggregated", "prefill", "decode", "encode")
WORKERS = ("w0", "w1", "w2", "w3")
REASON = "kv transfer: found kv_cache_dtype bfloat16, allowed fp8 as prefill worker p has"


@pytest.mark.parametrize(
    ("decode", "found"),
    [
        (PREFILL, ""),
        ({"kv_cache_dtype": "FP8", "transfer_backend": "nixl"}, ""),
        ({"kv_cache_dtype": "fp8"}, ""),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16, allowed fp8"),
        (PREFILL | {"transfer_backend": "UCX"}, "transfer_backend ucx, allowed nixl"),
        ({"block_size": 64}, "block_size 64, allowed 16"),
    ],
)
def test_a_pair_fits_where_dtypes_and_block_sizes_are_the_same_and_stated_backends_too(
    decode: dict[str, Any], found: str
) -> None:
    reason = misfit(registered("p", role="prefill", **PREFILL), registered("d", role="decode", **decode))
    assert reason == (found and f"kv transfer: found {found} as prefill worker p has")


@pytest.mark.parametrize("prefill", ["fp8", "", "auto"])
@pytest.mark.parametrize("decode", ["", "auto"])
def test_an_unknown_dtype_fits_none(prefill: str, decode: str) -> None:
    workers = (
        registered("p", role="prefill", kv_cache_dtype=prefill),
        registered("d", role="decode", kv_cache_dtype=decode),
    )
    unknown = "d" if prefill == "fp8" else "p and d"
    assert misfit(*workers) == (
        f"kv transfer: found kv_cache_dtype unknown of {unknown}, allowed fp8, bfloat16 or the like"
    )


registrations = st.builds(
    lambda worker_id, role, names, **fields: registered(worker_id, role=role, served_names=names, **fields),
    st.sampled_from(WORKERS),
    st.sampled_from(ROLES),
    st.sampled_from([("m",), ("n",), ("m", "n")]),
    kv_cache_dtype=st.sampled_from(DTYPES),
    transfer_backend=st.sampled_from(BACKENDS),
    block_size=st.sampled_from(SIZES),
)
events = st.one_of(
    registrations,
    st.sampled_from(WORKERS).map(lambda name: WorkerLeft(worker_id=name, instance=f"{name}-1")),
    st.sampled_from(WORKERS).map(lambda name: WorkerDraining(worker_id=name, instance=f"{name}-1")),
)


@given(st.lists(events, max_size=12))
def test_whatever_came_and_went_a_model_has_misfits_if_one_of_its_pairs_does_not_work(told: list[Any]) -> None:
    folded = state()
    for event in told:
        folded.apply(FleetApplied(now_s=0.0, event=event))
        known = [worker.registration for worker in folded.fleet.serving("m")]
        pairs = ((one, other) for one in known for other in known if (one.role, other.role) == ("prefill", "decode"))
        view = folded.model_view("m", 16, HASH_SCHEME, 0.0)
        assert view.has_misfits == any(misfit(*pair) for pair in pairs)


def test_reasons_are_made_once_for_a_view_and_anew_when_the_fleet_changes() -> None:
    pair = registered("p", role="prefill", **PREFILL), registered("d", role="decode", kv_cache_dtype="bfloat16")
    folded = joined(*pair, registered("e", role="decode", **PREFILL))
    decode, prefill = route(phase="decode", prefill_worker="p"), route(phase="prefill", prefill_worker="")
    view = folded.model_view("m", 16, HASH_SCHEME, 0.0)
    first = exclusions(view, decode)
    assert (REASON in first, any("none of" in each for each in exclusions(view, prefill))) == (True, False)
    assert exclusions(view, decode)[first.index(REASON)] is first[first.index(REASON)]
    folded.apply(FleetApplied(now_s=0.0, event=WorkerLeft(worker_id="e", instance="e-1")))
    view = folded.model_view("m", 16, HASH_SCHEME, 0.0)
    assert "kv transfer: none of 1 decode workers can take its blocks" in exclusions(view, prefill)


# ------------------------------------------------------------------------------------------------- decisions
BOTH = (row("p/0", role="prefill"), row("q/0", role="prefill"), row("d/0", role="decode"), row("e/0", role="decode"))


def with_dtypes(**dtypes: str) -> Any:
    """Return a view of `BOTH`, with these data types of their KV."""
    moment = view(*BOTH)
    registrations = tuple(
        msgspec.structs.replace(each, kv_cache_dtype=dtypes[each.worker_id]) for each in moment.registrations
    )
    return moment._replace(registrations=registrations, has_misfits=True, apart={})


def test_a_decode_worker_that_cannot_take_the_blocks_is_not_paired_and_the_reason_is_told() -> None:
    moment = with_dtypes(p="fp8", q="auto", d="bfloat16", e="fp8")
    found = decide(moment, route(phase="decode", prefill_worker="p"), Policy(), 1)
    assert (found.winner, found.exclusions[2:]) == (rank("e/0"), (REASON, ""))
    for other in ("gone", "", None):
        free = decide(moment, route(phase="decode", prefill_worker=other), Policy(), 1)
        assert free.exclusions[2:] == ("", "")


def test_a_prefill_worker_that_fits_no_decode_worker_computes_nothing() -> None:
    moment = with_dtypes(p="fp8", q="bfloat16", d="bfloat16", e="auto")
    found = decide(moment, route(phase="prefill", prefill_worker=""), Policy(), 1)
    assert found.winner == rank("q/0")
    assert found.exclusions[0] == "kv transfer: none of 2 decode workers can take its blocks"
    assert found.exclusions[1] == ""


def test_a_prompt_longer_than_a_buffer_is_not_transferred_through_it() -> None:
    small = view(*BOTH)
    told = tuple(registered(each.worker_id, role=each.role, transfer_buffer_tokens=39) for each in small.registrations)
    for phase in ("prefill", "decode"):
        with pytest.raises(NoEligibleWorker) as error:
            decide(
                small._replace(registrations=told),
                route(40, phase=phase, prefill_worker=""),
                Policy(),
                1,
            )
        assert "kv transfer: 40 tokens, transfer_buffer_tokens 39" in {each.reason for each in error.value.exclusions}
        for fits in (route(39, phase=phase, prefill_worker=""), route(40, phase=phase)):
            assert "kv transfer" not in str(decide(small._replace(registrations=told), fits, Policy(), 1).exclusions)


def test_a_record_of_a_former_version_is_judged_as_it_was() -> None:
    moment = with_dtypes(p="fp8", q="fp8", d="bfloat16", e="auto")
    assert decide(moment, route(phase="prefill"), Policy(), 1).exclusions[:2] == ("", "")
