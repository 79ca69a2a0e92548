"""Which fleet events a reader refuses, and why; what a signature covers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol import fleet, subjects
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft
from kv_protocol.fleet_gate import (
    CLAIM_HEADER,
    REFUSAL_REASONS,
    SIGNATURE_HEADER,
    WORKERS_MAX,
    FleetEventRefused,
    FleetGate,
    claim_in,
)
from tests.unit.router.samples import MODEL, registered

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SUBJECT = subjects.fleet(MODEL, "w0")
LEFT = WorkerLeft(worker_id="w0", instance="w0-1")


def refusal(gate: FleetGate, event: FleetEvent | bytes, headers: Any = None, subject: str = SUBJECT) -> str:
    """Return the reason for which the gate refuses the event; empty if it admits it."""
    data, reason = event if isinstance(event, bytes) else fleet.encode(event), ""
    expected = dict(gate.refused_total)
    try:
        gate.admit(subject, data, headers)
    except FleetEventRefused as error:
        reason = error.reason
        expected[reason] += 1
    assert gate.refused_total == expected
    return reason


def signed(event: FleetEvent, time_ns: int, key: bytes = KEY, subject: str = SUBJECT) -> dict[str, str]:
    """Return the headers that a signer with a fresh memory gives the event."""
    return FleetGate((key,)).headers(subject, event.worker_id, fleet.encode(event), time_ns)


# ------------------------------------------------------------------------------------------------- without keys
def test_events_that_fit_their_subject_are_admitted_as_often_as_they_come() -> None:
    gate = FleetGate()
    for event in (registered(), registered(), WorkerDraining(worker_id="w0", instance="w0-1"), LEFT, LEFT):
        assert gate.admit(SUBJECT, fleet.encode(event)) == event
    assert gate.refused_total == dict.fromkeys(REFUSAL_REASONS, 0)


def test_an_event_on_another_worker_s_subject_is_refused() -> None:
    assert refusal(FleetGate(), b"{") == "unreadable"
    for event in (registered("w1"), WorkerLeft(worker_id="w1", instance="w1-1")):
        assert refusal(FleetGate(), event) == "subject"


def test_a_registration_on_another_model_s_subject_is_refused_and_names_both() -> None:
    with pytest.raises(FleetEventRefused) as raised:
        FleetGate().admit(subjects.fleet("n", "w0"), fleet.encode(registered()))
    assert str(raised.value) == (f"subject: found {subjects.fleet('n', 'w0')}, allowed {SUBJECT} by the event's fields")


def test_an_instance_leaves_only_on_the_subject_of_its_registration() -> None:
    gate = FleetGate()
    assert refusal(gate, registered()) == ""
    assert refusal(gate, LEFT, subject=subjects.fleet("n", "w0")) == "subject"
    assert refusal(gate, LEFT) == ""


def test_another_address_of_a_registered_instance_is_refused_and_both_addresses_are_named() -> None:
    gate = FleetGate()
    gate.admit(SUBJECT, fleet.encode(registered()))
    with pytest.raises(FleetEventRefused) as raised:
        gate.admit(SUBJECT, fleet.encode(registered(base_url="http://10.6.6.6:1")))
    assert raised.value.reason == "base_url"
    assert str(raised.value) == (
        "worker w0: base_url: found http://10.6.6.6:1, allowed http://127.0.0.1:1 of instance w0-1"
    )


def test_another_instance_or_one_that_left_may_have_another_address() -> None:
    gate = FleetGate()
    assert refusal(gate, registered()) == ""
    assert refusal(gate, registered(instance="w0-2", base_url="http://127.0.0.1:2")) == ""
    assert refusal(gate, WorkerLeft(worker_id="w0", instance="w0-2")) == ""
    assert refusal(gate, registered(instance="w0-2", base_url="http://127.0.0.1:3")) == ""


def test_the_end_of_another_instance_changes_nothing_that_is_known() -> None:
    gate = FleetGate()
    assert refusal(gate, registered()) == ""
    assert refusal(gate, WorkerLeft(worker_id="w0", instance="w0-2")) == ""
    assert refusal(gate, registered(base_url="http://127.0.0.1:2")) == "base_url"


def test_a_gate_remembers_a_bounded_number_of_workers_and_forgets_the_oldest() -> None:
    gate = FleetGate()
    for worker_id in ("w0", "w1", *(f"x{each}" for each in range(WORKERS_MAX - 1))):
        gate.admit(subjects.fleet(MODEL, worker_id), fleet.encode(registered(worker_id)))
    moved = "http://127.0.0.1:2"
    assert refusal(gate, registered("w1", base_url=moved), subject=subjects.fleet(MODEL, "w1")) == "base_url"
    assert refusal(gate, registered(base_url=moved)) == ""


def test_without_a_key_nothing_is_added_to_what_is_published() -> None:
    assert FleetGate().headers(SUBJECT, "w0", b"{}", 1) == {}
    assert FleetGate().headers(SUBJECT, "w0", b"{}", 1, claim=3) == {CLAIM_HEADER: "3"}


# ------------------------------------------------------------------------------------------------- with keys
def test_a_signature_is_the_hmac_of_subject_time_and_bytes() -> None:
    """Source of the vector: `printf 'kv-router fleet event v1\\n...' | openssl dgst -sha256 -hmac`."""
    at = 1_700_000_000_000_000_000
    headers = FleetGate((KEY,)).headers("kv.v1.fleet.m-1.w0", "w0", b'{"type":"left"}', at, claim=12)
    mac = "6d2b8826c0b803acbb27f4214c617dde07bbb073392a113d850ec09047ed908d"
    assert headers == {CLAIM_HEADER: "12", SIGNATURE_HEADER: f"v1 {at} {mac}"}


def test_with_a_key_signed_events_are_admitted_and_unsigned_ones_refused() -> None:
    for event in (registered(), WorkerDraining(worker_id="w0", instance="w0-1"), LEFT):
        gate = FleetGate((KEY,))
        for headers in (None, {SIGNATURE_HEADER: "v1 5 zz"}, signed(event, 5, OTHER_KEY)):
            assert refusal(gate, event, headers) == "signature"
        assert refusal(gate, event, signed(event, 5)) == ""


def test_what_is_signed_cannot_be_changed() -> None:
    data, header = fleet.encode(registered()), signed(registered(), 5)[SIGNATURE_HEADER]
    for forged, with_header in (
        (data.replace(b"127.0.0.1", b"10.66.6.6"), header),
        (data, header.replace("v1 5 ", "v1 6 ")),
        (data + b" ", header),
    ):
        assert refusal(FleetGate((KEY,)), forged, {SIGNATURE_HEADER: with_header}) == "signature"


def test_a_signature_covers_the_claim() -> None:
    data = fleet.encode(registered())
    headers = FleetGate((KEY,)).headers(SUBJECT, "w0", data, 5, claim=1)
    for claim in ("", "2", "01", "1 "):
        assert refusal(FleetGate((KEY,)), data, headers | {CLAIM_HEADER: claim}) == "signature"
    assert refusal(FleetGate((KEY,)), data, headers) == ""


def test_a_claim_is_a_place_in_a_stream_or_none() -> None:
    assert (claim_in({CLAIM_HEADER: "7"}), claim_in(None)) == (7, 0)
    for value in ("0", "", "-1", "1" * 19, "x"):
        assert claim_in({CLAIM_HEADER: value}) == 0


def test_a_signature_counts_on_its_own_subject_alone() -> None:
    elsewhere = signed(LEFT, 5, subject=subjects.fleet("n", "w0"))
    assert refusal(FleetGate((KEY,)), LEFT, elsewhere) == "signature"


def test_an_older_signed_event_is_refused_and_a_repeated_one_is_not() -> None:
    gate, left = FleetGate((KEY,)), signed(LEFT, 6)
    assert refusal(gate, registered(), signed(registered(), 5)) == ""
    assert refusal(gate, LEFT, left) == ""
    assert refusal(gate, LEFT, left) == ""
    assert refusal(gate, registered(), signed(registered(), 5)) == "replayed"
    assert refusal(gate, registered(), signed(registered(), 7)) == ""
    assert refusal(gate, LEFT, left) == "replayed"


def test_a_signer_whose_clock_is_behind_signs_later_than_what_it_has_admitted() -> None:
    reader, late = FleetGate((KEY,)), FleetGate((KEY,))
    drained = WorkerDraining(worker_id="w0", instance="w0-1")
    for gate in (reader, late):
        assert refusal(gate, drained, signed(drained, 1000)) == ""
    headers = late.headers(SUBJECT, "w0", fleet.encode(LEFT), 10)
    assert headers[SIGNATURE_HEADER].startswith("v1 1001 ")
    assert refusal(reader, LEFT, headers) == ""


def test_keys_are_rotated_by_adding_the_new_one_first_everywhere() -> None:
    old, both, new = FleetGate((OTHER_KEY,)), FleetGate((KEY, OTHER_KEY)), FleetGate((KEY,))
    by_old, by_new = signed(LEFT, 5, OTHER_KEY), both.headers(SUBJECT, "w0", fleet.encode(LEFT), 5)
    assert [refusal(gate, LEFT, by_old) for gate in (old, both, new)] == ["", "", "signature"]
    assert [refusal(gate, LEFT, by_new) for gate in (old, both, new)] == ["signature", "", ""]


@given(st.dictionaries(st.sampled_from([SIGNATURE_HEADER, "x"]), st.text(max_size=90)), st.binary(max_size=60))
def test_no_bytes_and_no_header_do_more_than_be_refused(headers: dict[str, str], data: bytes) -> None:
    assert refusal(FleetGate((KEY,)), data, headers) in ("unreadable", "signature")
