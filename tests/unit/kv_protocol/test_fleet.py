import json
from collections.abc import Callable
from typing import Any

import pytest

from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import (
    BLOCKS_MAX,
    TOKENS_MAX,
    FleetEvent,
    WorkerDraining,
    WorkerLeft,
    WorkerRegistered,
    decode_fleet_event,
    decode_heartbeat,
    encode,
)

Fields = dict[str, Any]

LEAST: Fields = {
    "worker_id": "w-1",
    "instance": "i",
    "model": "org/m",
    "served_names": ("m",),
    "base_url": "http://127.0.0.1:8101",
    "block_size": 32,
    "hash_scheme": "xxh3-1337",
    "tokenizer_digest": "t",
    "template_digest": "c",
    "canary": 2**64 - 1,
}
FULL: Fields = LEAST | {
    "dp_ranks": (0, 1, 4095),
    "role": "prefill",
    "total_kv_blocks": 1000,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "max_seq_len": 131_072,
    "max_prompt_tokens": 8192,
    "loras": ("a", "适配器"),
    "taints": ("spot",),
    "transfer_domain": "rack-1",
    "event_source": "simulated",
    "accepts_token_ids": True,
    "version": "1",
    "endpoint": "dynamo.backend.generate",
    "kv_cache_dtype": "fp8",
    "block_reuse": True,
    "transfer_buffer_tokens": 65536,
    "transfer_backend": "NIXL",
    "api_endpoints": ("responses", "a later one"),
    "stream_token_ids": "vllm",
    "ends_drain": True,
    "drained": True,
    "images": None,
}
EVENTS: list[FleetEvent] = [
    WorkerRegistered(**LEAST),
    WorkerRegistered(**FULL),
    WorkerDraining(worker_id="w-1", instance="i"),
    WorkerLeft(worker_id="w-1", instance="i"),
    WorkerLeft(worker_id="w-1", instance="i", reason="killed"),
]
HEARTBEAT: Fields = {"instance": "i", "epoch": 2**64 - 1, "last_seq": 7, "tiers": [[0, 3, 2**64 - 1]], "stale": "gap"}

BAD_URLS = [
    "",
    "127.0.0.1:8101",
    "//h:1",
    "ftp://h:1",
    "http://",
    "http://:80",
    "http://user@h:1",
    "http://user:password@h:1",
    "http://:password@h:1",
    "http://@h:1",
    "http://h:1?q=1",
    "http://h:1?",
    "http://h:1/#f",
    "http://h:1#",
    "http://h:0",
    "http://h:65536",
    "http://h:x",
    "http://h:-1",
    "http://[::1",
    "http://[h]:1",
    " http://h:1",
    "http://h:1 ",
    "http://a b:1",
    "http://h\n:1",
    "http://h:1\r\nX-Injected: 1",
    "http://h\0:1",
    "http://h:1\\..",
    "http://\u2100.com:1",
]
BAD_FIELDS: list[tuple[str, Any]] = [
    ("transfer_backend", "N" * 257),
    ("api_endpoints", ("",)),
    ("api_endpoints", ("e" * 65,)),
    ("api_endpoints", tuple(f"e{at}" for at in range(65))),
    *(("base_url", url) for url in BAD_URLS),
    *(("worker_id", value) for value in ["", "W", "a.b", "*", "a\n", "z" * 65]),
    *(("dp_ranks", value) for value in [(), (0, 0), (1, 2, 1)]),
    *(("block_size", value) for value in [0, -1, 4097]),
    *(
        (field, value)
        for field in [
            "canary",
            "total_kv_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_seq_len",
            "max_prompt_tokens",
        ]
        for value in [-1, 2**64, 10**30]
    ),
    ("total_kv_blocks", BLOCKS_MAX + 1),
    ("max_seq_len", TOKENS_MAX + 1),
    ("transfer_buffer_tokens", TOKENS_MAX + 1),
    *((field, value) for field in ["instance", "model"] for value in ["", "x" * 100_000]),
    *((field, "x" * 257) for field in ["model", "tokenizer_digest", "transfer_domain", "version", "endpoint"]),
    ("base_url", "http://h/" + "x" * 2048),
    ("served_names", ()),
]
BAD_MEMBERS: list[tuple[str, tuple[object, ...], str]] = [
    ("dp_ranks", (0, -1), r"fleet event: dp_rank: found -1, allowed 0\.\.4095"),
    ("dp_ranks", (0, 4096), r"fleet event: dp_rank: found 4096, allowed 0\.\.4095"),
    ("served_names", ("m", ""), r"served_names\[1\]: found '', allowed 1..256 characters"),
    ("served_names", ("m" * 257,), r"served_names\[0\]: found 'm+\.\.\., allowed 1..256 characters"),
    ("served_names", ("m",) * 257, "served_names: found '257 names', allowed 256 at most"),
    ("loras", ("",), r"loras\[0\]: found '', allowed 1..256 characters"),
    ("loras", ("a",) * 4097, "loras: found '4097 names', allowed 4096 at most"),
    ("taints", ("spot", "a,b"), r"taints\[1\]: found 'a,b', allowed no comma"),
    ("taints", (" spot",), r"taints\[0\]: found ' spot', allowed no comma, no space at its ends"),
    ("taints", ("",), r"taints\[0\]: found ''"),
    ("taints", ("a",) * 65, "taints: found '65 names', allowed 64 at most"),
]
OTHER_TYPES: list[tuple[str, object]] = [
    *(("role", "router"), ("event_source", 5), ("block_size", "32"), ("block_size", 32.5), ("canary", None)),
    *(("served_names", "m"), ("dp_ranks", [0, "1"]), ("accepts_token_ids", 1)),
]


def wire(fields: Fields, kind: str = "registered") -> bytes:
    """Return JSON as any peer could write it, with integers of any length."""
    return json.dumps({"type": kind, **fields}).encode()


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_a_fleet_event_survives_the_wire(event: FleetEvent) -> None:
    assert decode_fleet_event(encode(event)) == event


def test_a_registration_reads_as_json_with_its_type() -> None:
    assert json.loads(encode(WorkerRegistered(**FULL))) == {
        "type": "registered",
        **{key: list(value) if isinstance(value, tuple) else value for key, value in FULL.items()},
    }


def test_a_field_of_a_later_version_is_passed_over() -> None:
    assert decode_fleet_event(wire(LEAST | {"colour": {"deep": [1]}})) == WorkerRegistered(**LEAST)


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:443", "http://[::1]:80", "http://node_1.example:65535/base/", "HTTP://H:1"]
)
def test_a_worker_is_reached_at_any_plain_base_url(url: str) -> None:
    assert WorkerRegistered(**LEAST | {"base_url": url}).base_url == url


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=repr)
def test_a_registration_with_a_bad_field_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(MalformedMessage, match=rf"fleet event: {field}: found "):
        decode_fleet_event(wire(LEAST | {field: value}))


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [*BAD_MEMBERS, *((field, value, rf"`\$\.{field}") for field, value in OTHER_TYPES)],
)
def test_a_registration_with_a_bad_member_or_a_field_of_another_type_is_refused_by_its_place(
    field: str, value: object, refusal: str
) -> None:
    with pytest.raises(MalformedMessage, match=refusal):
        decode_fleet_event(wire(LEAST | {field: value}))


def test_a_registration_at_its_bounds_is_accepted() -> None:
    counts = dict.fromkeys(
        ["max_num_seqs", "max_num_batched_tokens", "max_seq_len", "transfer_buffer_tokens"], TOKENS_MAX
    )
    names = {"served_names": ("n" * 256,) * 256, "taints": ("t" * 256,) * 64, "model": "m" * 256, "instance": "i" * 128}
    event = WorkerRegistered(**LEAST | counts | names | {"total_kv_blocks": BLOCKS_MAX})
    assert decode_fleet_event(encode(event)) == event


@pytest.mark.parametrize("kind", ["draining", "left"])
@pytest.mark.parametrize(
    ("worker_id", "instance", "field"), [("w", "", "instance"), ("w", "i" * 129, "instance"), ("A.B", "i", "worker_id")]
)
def test_a_worker_that_goes_is_checked_too(kind: str, worker_id: str, instance: str, field: str) -> None:
    with pytest.raises(MalformedMessage, match=f"{field}: found '"):
        decode_fleet_event(wire({"worker_id": worker_id, "instance": instance}, kind))


@pytest.mark.parametrize("field", LEAST)
def test_a_registration_without_a_required_field_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(MalformedMessage, match=f"missing required field `{field}`"):
        decode_fleet_event(wire({key: value for key, value in LEAST.items() if key != field}))


def test_a_fleet_event_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="Invalid value 'reborn'"):
        decode_fleet_event(wire(LEAST, "reborn"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epoch": -1}, "epoch: found -1"),
        ({"epoch": 2**64}, "epoch: found 18446744073709551616"),
        ({"last_seq": -1}, "last_seq: found -1"),
        ({"last_seq": 10**30}, "last_seq: found 1000"),
        ({"tiers": [[4, 1, 1]]}, r"Invalid enum value 4 - at `\$\.tiers\[0\]\[0\]"),
        ({"tiers": [[0, -1, 1]]}, "block_count: found -1"),
        ({"tiers": [[0, 1, 2**64]]}, "digest: found 18446744073709551616"),
        ({"tiers": [[0, 1]]}, r"at `\$\.tiers"),
        ({"tiers": {}}, r"at `\$\.tiers"),
        ({"instance": None}, r"at `\$\.instance"),
        ({"stale": 1}, r"at `\$\.stale"),
        ({"instance": ""}, "instance: found ''"),
        ({"instance": "i" * 129}, "instance: found 'iii"),
        ({"stale": "s" * 4097}, "stale: found 'sss"),
    ],
)
def test_a_heartbeat_with_a_bad_field_is_refused_by_its_name(change: Fields, named: str) -> None:
    assert decode_heartbeat(wire(HEARTBEAT)).last_seq == 7
    with pytest.raises(MalformedMessage, match=f"heartbeat: .*{named}"):
        decode_heartbeat(wire(HEARTBEAT | change))


@pytest.mark.parametrize("decode", [decode_fleet_event, decode_heartbeat])
@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"null", b"[]", b"{", b'{"type":1}', b"\xff", b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000],
    ids=lambda data: repr(data[:12]),
)
def test_bytes_that_are_no_message_are_refused(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)
