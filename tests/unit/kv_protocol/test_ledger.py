import msgspec
import pytest

from kv_protocol.codec import pack_u64
from kv_protocol.errors import UNDECODABLE, LimitExceeded
from kv_protocol.ledger import Routed


def routed(**changed: object) -> Routed:
    fields = {"lease_id": "l", "worker_id": "w", "dp_rank": 0, "blocks": pack_u64((1, 2)), "uncached_tokens": 3}
    return Routed(**fields | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blocks", b"1234567"),
        ("blocks", b"123456789"),
        ("uncached_tokens", -1),
        ("extra_blocks", -1),
        ("uncached_tokens", 1 << 40),
    ],
)
def test_a_promise_that_cannot_be_does_not_exist(field: str, value: object) -> None:
    with pytest.raises(LimitExceeded, match=field):
        routed(**{field: value})


def test_nor_can_it_be_read() -> None:
    data = msgspec.msgpack.encode(msgspec.to_builtins(routed(), builtin_types=(bytes,)) | {"blocks": b"123"})
    with pytest.raises(UNDECODABLE, match="blocks"):
        msgspec.msgpack.decode(data, type=Routed)


def test_its_blocks_are_read_as_they_were_written() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(routed()), type=Routed) == routed()
