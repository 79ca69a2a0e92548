import json
import re
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
    "http://hôst:1",
    "http://h:1/\x90",
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
COUNTS = ("max_num_seqs", "max_num_batched_tokens", "max_seq_len", "max_prompt_tokens", "transfer_buffer_tokens")
BAD_FIELDS: dict[str, list[Any]] = {
    "worker_id": ["", "W", "a.b", "*", "a\n", "z" * 65],
    "instance": ["", "x" * 129],
    "model": ["", "x" * 257],
    "served_names": [(), ("m", ""), ("m" * 257,), ("m",) * 257, "m"],
    "base_url": [*BAD_URLS, "http://h/" + "x" * 2048],
    "block_size": [0, -1, 4097, "32", 32.5],
    "canary": [-1, 2**64, 10**30, None],
    "dp_ranks": [(), (0, 0), (1, 2, 1), (0, -1), (0, 4096), [0, "1"]],
    "role": ["router"],
    "event_source": [5],
    "accepts_token_ids": [1],
    "total_kv_blocks": [-1, BLOCKS_MAX + 1, 2**64, 10**30],
    **{field: [-1, TOKENS_MAX + 1, 2**64, 10**30] for field in COUNTS},
    "loras": [("",), ("a",) * 4097],
    "taints": [("spot", "a,b"), (" spot",), ("spot ",), ("",), ("a",) * 65],
    "api_endpoints": [("",), ("e" * 65,), tuple(f"e{at}" for at in range(65))],
    **{
        field: ["x" * 257]
        for field in ("tokenizer_digest", "transfer_domain", "transfer_backend", "version", "endpoint")
    },
}


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


def test_a_registration_with_a_bad_field_is_refused_by_its_name() -> None:
    for field, values in BAD_FIELDS.items():
        for value in values:
            with pytest.raises(MalformedMessage) as refused:
                decode_fleet_event(wire(LEAST | {field: value}))
            assert re.search(rf"fleet event: {field}: found |at `\$\.{field}", str(refused.value)), (field, value)


def test_a_registration_at_its_bounds_is_accepted() -> None:
    counts = dict.fromkeys(COUNTS, TOKENS_MAX)
    names = {"served_names": ("n" * 256,) * 256, "taints": ("t" * 256,) * 64, "model": "m" * 256, "instance": "i" * 128}
    event = WorkerRegistered(**LEAST | counts | names | {"total_kv_blocks": BLOCKS_MAX})
    assert decode_fleet_event(encode(event)) == event


def test_a_worker_that_goes_is_checked_too() -> None:
    goes = {"worker_id": "w", "instance": "i"}
    for kind in ("draining", "left"):
        for field, value in (("instance", ""), ("instance", "i" * 129), ("worker_id", "A.B")):
            with pytest.raises(MalformedMessage, match=rf"`\$\.{field}"):
                decode_fleet_event(wire(goes | {field: value}, kind))


def test_a_registration_without_a_required_field_is_refused_by_its_name() -> None:
    for field in LEAST:
        with pytest.raises(MalformedMessage, match=f"missing required field `{field}`"):
            decode_fleet_event(wire({key: value for key, value in LEAST.items() if key != field}))


def test_a_fleet_event_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="Invalid value 'reborn'"):
        decode_fleet_event(wire(LEAST, "reborn"))


def test_a_heartbeat_with_a_bad_field_is_refused_by_its_name() -> None:
    assert decode_heartbeat(wire(HEARTBEAT)).last_seq == 7
    changes: list[tuple[Fields, str]] = [
        ({"epoch": -1}, "at `$.epoch"),
        ({"epoch": 2**64}, "epoch, last_seq, tiers: found 18446744073709551616"),
        ({"last_seq": -1}, "at `$.last_seq"),
        ({"last_seq": 10**30}, "epoch, last_seq, tiers: found 1000"),
        ({"tiers": [[4, 1, 1]]}, "Invalid enum value 4 - at `$.tiers[0][0]"),
        ({"tiers": [[0, -1, 1]]}, "at `$.tiers[0][1]"),
        ({"tiers": [[0, 2**64, 1]]}, "epoch, last_seq, tiers: found 18446744073709551616"),
        ({"tiers": [[0, 1, 2**64]]}, "epoch, last_seq, tiers: found 18446744073709551616"),
        ({"tiers": [[0, 1]]}, "at `$.tiers"),
        ({"tiers": {}}, "at `$.tiers"),
        *(({"instance": value}, "at `$.instance") for value in (None, "", "i" * 129)),
        *(({"stale": value}, "at `$.stale") for value in (1, "s" * 4097)),
    ]
    for change, named in changes:
        with pytest.raises(MalformedMessage, match=f"heartbeat: .*{re.escape(named)}"):
            decode_heartbeat(wire(HEARTBEAT | change))
