"""Multimodal items and salts, in every spelling that engines use."""

from typing import Any

import pytest

from kv_protocol.hashing import BASE_SEED, Namespace, hash_seed, mm_hash
from tests.unit.worker_agent.wire_words import read, stored, stored_array, stored_map
from worker_agent.events.dialects.batches import BatchDecoder
from worker_agent.events.engine_events import EngineStored

DIGEST = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
NUMBER = 0x0123456789ABCDEF
TAG = "dynamo-cache-salt:"
SALTED = Namespace(cache_salt="s")


def two_blocks(**keys: object) -> EngineStored:
    (event,) = read(stored_map(block_hashes=[7, 8], token_ids=[1, 2, 3, 4, 5, 6, 7, 8], **keys)).events
    assert isinstance(event, EngineStored)
    return event


def infos(*items: int) -> dict[str, object]:
    return {"mm_objects": [{"mm_hash": item, "offsets": [[0, 2]]} for item in items]}


def test_a_digest_is_its_first_sixteen_digits() -> None:
    assert mm_hash(DIGEST) == mm_hash(DIGEST.upper()) == NUMBER


def test_another_name_is_hashed_as_an_adapter_s_is() -> None:
    assert mm_hash("my-lora") == (hash_seed("my-lora") - BASE_SEED) % 2**64


@pytest.mark.parametrize(
    ("keys", "mm_hashes"),
    [
        pytest.param({"block_mm_infos": [infos(5), None]}, ((5,), ()), id="infos"),
        pytest.param({"block_mm_infos": [None, infos(5, 2**64 - 1)]}, ((), (5, 2**64 - 1)), id="infos of two items"),
        pytest.param({"block_mm_infos": [infos(-1)]}, ((2**64 - 1,), ()), id="infos as i64, and too short"),
        pytest.param({"block_mm_infos": [None, None, infos(5)]}, (), id="infos too long"),
        pytest.param({"block_mm_infos": [infos(), infos()]}, (), id="infos of no items"),
        pytest.param({"extra_keys": [[DIGEST], None]}, ((NUMBER,), ()), id="digest"),
        pytest.param({"extra_keys": [None, [[DIGEST, 3]]]}, ((), (NUMBER,)), id="digest with an offset"),
        pytest.param({"extra_keys": [[["uuid-1", 0]]]}, ((mm_hash("uuid-1"),), ()), id="name with an offset"),
        pytest.param({"extra_keys": [["uuid-1"]]}, (), id="name alone"),
        pytest.param({"extra_keys": [[DIGEST[:63]], [DIGEST + "0"]]}, (), id="no digest"),
        pytest.param({"extra_keys": [[b"embeddings", 1, 1.5, True]]}, (), id="other keys"),
        pytest.param({"mm_keys": [[{"type": "mm_key", "hash": DIGEST}], None]}, ((NUMBER,), ()), id="mm_keys"),
        pytest.param({"mm_keys": [[], [{"hash": "uuid-1", "uuid": "u"}]]}, ((), (mm_hash("uuid-1"),)), id="named"),
        pytest.param({"mm_keys": [None, {"hash": DIGEST}]}, ((), (NUMBER,)), id="one mm_key a block"),
        pytest.param({"mm_keys": [[[DIGEST, 0, None]]]}, ((NUMBER,), ()), id="mm_keys as arrays"),
        pytest.param({"mm_keys": [[{"hash": ""}], [{"type": "mm_key"}]]}, (), id="mm_keys without a name"),
        pytest.param(
            {"mm_keys": [[], []], "extra_keys": [[DIGEST]]}, ((NUMBER,), ()), id="the first spelling that names one"
        ),
        pytest.param(
            {"block_mm_infos": [infos(5)], "mm_keys": [[{"hash": DIGEST}]], "extra_keys": [[OTHER]]},
            ((5,), ()),
            id="infos before mm_keys before extra_keys",
        ),
        pytest.param({"mm_keys": [[{"hash": DIGEST}]], "extra_keys": [[OTHER]]}, ((NUMBER,), ()), id="mm_keys first"),
    ],
)
def test_items_of_blocks_are_found_in_every_spelling(
    keys: dict[str, object], mm_hashes: tuple[tuple[int, ...], ...]
) -> None:
    assert two_blocks(**keys).mm_hashes == mm_hashes


def test_a_salt_is_said_or_tagged_in_the_first_block() -> None:
    cases: list[tuple[dict[str, object], str | None]] = [
        ({}, None),
        ({"cache_salt": "s"}, "s"),
        ({"cache_salt": ""}, None),
        ({"extra_keys": [[TAG + "s"]]}, "s"),
        ({"extra_keys": [[TAG]]}, None),
        ({"extra_keys": [["adapter", DIGEST, TAG + "s"]], "lora_name": "adapter"}, "s"),
        ({"extra_keys": [[TAG + DIGEST]]}, DIGEST),
        ({"extra_keys": [None, [TAG + "s"]]}, None),
        ({"extra_keys": [["s"]]}, None),
        ({"extra_keys": [[TAG + "tagged"]], "cache_salt": "said"}, "said"),
        ({"extra_keys": [[TAG + "tagged"]], "cache_salt": ""}, "tagged"),
    ]
    for keys, cache_salt in cases:
        assert two_blocks(**keys).namespace.cache_salt == cache_salt, keys
    assert two_blocks(extra_keys=[[TAG + DIGEST]]).mm_hashes == ()  # a tagged digest is a salt and no item


def test_a_salt_of_names_only_is_kept_and_their_items_are_not() -> None:
    (event,) = read(stored_map(token_ids=[], extra_keys=[[TAG + "s", DIGEST]])).events
    assert isinstance(event, EngineStored)
    assert (event.namespace.cache_salt, event.mm_hashes) == ("s", ())


def test_unexplained_keys_are_counted() -> None:
    cases: list[tuple[list[object], int]] = [
        ([None, None], 0),
        ([["adapter", DIGEST, TAG + "s", ["uuid-1", 0]], ["adapter"]], 0),
        ([["adapter", "salt"], ["adapter"]], 1),
        ([[b"embeddings"], [1, 1.5]], 3),
        ([None, None, ["beyond the blocks"]], 0),
    ]
    for extra_keys, unexplained in cases:
        decoder, keys = BatchDecoder(), {"lora_name": "adapter", "extra_keys": extra_keys}
        event = stored_map(block_hashes=[7, 8], token_ids=[1, 2, 3, 4, 5, 6, 7, 8], **keys)
        assert read(event, decoder=decoder).refused == ()
        assert decoder.counts["unexplained_keys"] == unexplained, extra_keys


@pytest.mark.parametrize(
    ("slots", "fields"),
    [
        pytest.param(("adapter",), {"namespace": Namespace("adapter")}, id="adapter"),
        pytest.param(({"cache_salt": "s"},), {"namespace": SALTED}, id="metadata for the adapter"),
        pytest.param(({"cache_salt": None},), {}, id="metadata without a salt"),
        pytest.param(({"other": 1},), {}, id="other metadata"),
        pytest.param(("adapter", "session-1"), {"namespace": Namespace("adapter")}, id="a session for the keys"),
        pytest.param((None, [[DIGEST]]), {"mm_hashes": ((NUMBER,),)}, id="keys"),
        pytest.param((None, None, [infos(5)]), {"mm_hashes": ((5,),)}, id="items in a legacy tail"),
        pytest.param(
            ("adapter", [[TAG + "s"]], None, None, None, None, None, {"cache_salt": "s"}),
            {"namespace": Namespace("adapter", "s")},
            id="metadata behind a fixed tail",
        ),
        pytest.param(
            (None, None, None, None, {"cache_salt": "s"}),
            {"namespace": SALTED},
            id="metadata inside a tail",
        ),
    ],
)
def test_slots_behind_the_medium_of_an_array(slots: tuple[object, ...], fields: dict[str, Any]) -> None:
    assert read(stored_array(None, "GPU", *slots)).events == (stored(7, **fields),)


def test_the_numeric_id_of_an_adapter_is_not_its_name() -> None:
    assert read(stored_map(lora_id=7, lora_name=None)).events == (stored(7),)
