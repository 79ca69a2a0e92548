"""Every dialect of hop A says what its bytes say, and the numbers made of it are the peer's.

Bytes: `engine_payloads.py`. Numbers: the vectors `zmq_ingest_vectors`, made by the field's strongest peer.
"""

import json
from typing import Any

import msgspec
import pytest

from kv_protocol.errors import MalformedMessage
from kv_protocol.hashing import hash_seed, local_block_hashes
from tests.golden.engine_payloads import GOLDEN, Golden
from tests.support.paths import RECORDINGS
from tests.unit.worker_agent.wire_words import ignored
from worker_agent.events.dialects.batches import BatchDecoder
from worker_agent.events.engine_events import EngineBatch, EngineStored

INGEST: list[dict[str, Any]] = json.loads((RECORDINGS / "hash_vectors.json").read_bytes())["zmq_ingest_vectors"]
SAID: dict[str, dict[str, Any]] = {
    "map event, i64 hashes, two blocks": {"block_hashes": [-5, 6]},
    "plain [1,2,3,4]": {},
    "lora_name=my-lora": {"lora_name": "my-lora"},
    "cache_salt=s1": {"cache_salt": "s1"},
    "extra_keys=[['s1']] (untagged string -> ignored)": {"extra_keys": [["s1"]]},
    "lora_name=my-lora + extra_keys=[['my-lora','s1']] (salt ignored)": {
        "lora_name": "my-lora",
        "extra_keys": [["my-lora", "s1"]],
    },
    "extra_keys 64-hex MM id -> mm_hash=int(first 16 hex)": {"extra_keys": [["0123456789abcdef" * 4]]},
    "block_mm_infos mm_hash=5": {"block_mm_infos": [{"mm_objects": [{"mm_hash": 5, "offsets": []}]}]},
    "bigram tokens [[1,2],[2,3],[3,4],[4,5]] -> eagle window [1,2,3,4,5]": {
        "token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]
    },
    "lora+salt+mm (publish_stored)": {
        "lora_name": "my-lora",
        "cache_salt": "s1",
        "block_mm_infos": [{"mm_objects": [{"mm_hash": 5, "offsets": [[0, 2]]}]}],
    },
}
"""What an engine says in each vector, beside its tokens and one block hash. Source: the vectors' names."""


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_a_payload_says_what_its_bytes_say(golden: Golden) -> None:
    decoder = BatchDecoder()
    assert decoder.decode(3, bytes.fromhex(golden.payload)) == EngineBatch(
        sequence=3, time_s=golden.time_s, dp_rank=golden.dp_rank, events=golden.events
    )
    assert ignored(decoder) == golden.ignored


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_a_truncated_payload_is_malformed_wherever_it_is_cut(golden: Golden) -> None:
    whole = bytes.fromhex(golden.payload)
    for length in range(len(whole)):
        with pytest.raises(MalformedMessage):
            BatchDecoder().decode(0, whole[:length])


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_a_wrong_byte_anywhere_is_read_ignored_or_refused_and_never_more(golden: Golden) -> None:
    whole = bytes.fromhex(golden.payload)
    named = len(golden.events) + golden.ignored
    for at in range(len(whole)):
        for value in bytes.fromhex("00 01 7f 80 90 91 a0 c0 c1 c3 c4 ca cf d0 d6 dc de ff"):
            decoder = BatchDecoder()
            try:
                batch = decoder.decode(0, whole[:at] + bytes([value]) + whole[at + 1 :])
            except MalformedMessage:
                continue
            assert len(batch.events) + len(batch.refused) + ignored(decoder) <= named


@pytest.mark.parametrize("vector", INGEST, ids=lambda vector: vector["name"])
def test_what_an_engine_says_has_the_hashes_that_the_peer_gives_it(vector: dict[str, Any]) -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": vector["tokens"],
        "block_size": vector["kv_block_size"],
    }
    payload = msgspec.msgpack.encode([0.0, [event | SAID[vector["name"]]], 0])
    (read,) = BatchDecoder().decode(0, payload).events
    assert isinstance(read, EngineStored)
    found = local_block_hashes(
        read.token_ids,
        read.block_size,
        seed=hash_seed(*read.namespace),
        mm_hashes=read.mm_hashes,
        is_eagle=read.is_eagle,
    )
    assert found == vector["tokens_hashes_u64"]
