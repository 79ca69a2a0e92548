import msgspec
import pytest

from kv_protocol.codec import MESSAGE_BYTES_MAX, pack_u64
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.ledger import (
    EVENTS_MAX,
    PARTS_MAX,
    Expired,
    FirstToken,
    LedgerAsked,
    LedgerBeat,
    LedgerOpen,
    LedgerTold,
    OpenLease,
    ReplicaMessage,
    Routed,
    decode_replica,
    encode_replica,
)

ROUTED = Routed(lease_id="l", worker_id="w", dp_rank=0, blocks=pack_u64((1, (1 << 64) - 1)), uncached_tokens=3, epoch=9)
MESSAGES: list[ReplicaMessage] = [
    LedgerTold(router="r", life=1, seq=1, events=(ROUTED, FirstToken(lease_id="l"), Expired(lease_id="m"))),
    LedgerTold(router="r", life=1, seq=2, events=()),
    LedgerBeat(router="r", life=1, seq=2, leases=1, digest=(1 << 64) - 1, queued_tokens=5, blocks=2),
    LedgerAsked(router="r", number=7),
    LedgerOpen(router="r", life=1, seq=2, number=7, part=1, parts=2, leases=(OpenLease(ROUTED, is_prefilled=True),)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: ReplicaMessage) -> None:
    assert decode_replica(encode_replica(message)) == message


def told(**changed: object) -> dict[str, object]:
    return {"type": "told", "router": "r", "life": 1, "seq": 1, "events": []} | changed


def answer(**changed: object) -> dict[str, object]:
    return {"type": "open", "router": "r", "life": 1, "seq": 1, "number": 1, "leases": []} | changed


def routed(**changed: object) -> dict[str, object]:
    fields = {"type": "routed", "lease_id": "l", "worker_id": "w", "dp_rank": 0, "blocks": b"", "uncached_tokens": 3}
    return fields | changed


REFUSED = {
    "another type": told(type="else"),
    "a router's name": told(router="R."),
    "no name": told(router=""),
    "a long name": told(router="r" * 65),
    "a negative seq": told(seq=-1),
    "no lease id": told(events=[routed(lease_id="")]),
    "a long lease id": told(events=[routed(lease_id="l" * 129)]),
    "a worker's name": told(events=[routed(worker_id="W")]),
    "a rank": told(events=[routed(dp_rank=4096)]),
    "blocks cut": told(events=[routed(blocks=b"1234567")]),
    "negative tokens": told(events=[routed(uncached_tokens=-1)]),
    "too many tokens": told(events=[routed(uncached_tokens=1 << 40)]),
    "negative blocks": told(events=[routed(extra_blocks=-1)]),
    "a report": told(
        events=[
            {"type": "reconciled", "worker_id": "w", "dp_rank": 0}
            | dict.fromkeys(("running_requests", "waiting_requests", "used_blocks"), 0)
        ]
    ),
    "too many events": told(events=[{"type": "renewed", "lease_id": "l"}] * (EVENTS_MAX + 1)),
    "a part beyond": answer(part=2, parts=2),
    "no parts": answer(part=0, parts=0),
    "too many parts": answer(part=0, parts=PARTS_MAX + 1),
}


def test_what_may_not_be_is_refused() -> None:
    for name, found in REFUSED.items():
        try:
            decode_replica(msgspec.msgpack.encode(found))
        except MalformedMessage:
            continue
        pytest.fail(f"{name} is accepted")


@pytest.mark.parametrize("blocks", [b"1234567", b"123456789"])
def test_a_promise_of_blocks_that_are_cut_does_not_exist(blocks: bytes) -> None:
    with pytest.raises(LimitExceeded, match="blocks"):
        msgspec.structs.replace(ROUTED, blocks=blocks)


def test_a_message_beyond_all_bounds_is_not_looked_at() -> None:
    with pytest.raises(MalformedMessage, match="bytes"):
        decode_replica(bytes(2 * MESSAGE_BYTES_MAX + 1))
