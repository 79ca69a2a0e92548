"""Batches of hop A: what stands, what is repaired, what is ignored, what is refused, and that none costs the others."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.capture.payloads import MEDIUM_OF_TIER
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Tier
from tests.unit.worker_agent.wire_words import GOOD, GOOD_MAP, ignored, read, stored, stored_array, stored_map, wire
from worker_agent.events.dialects.batches import KINDS, TIER_OF_MEDIUM, TIME_S_MAX, BatchDecoder
from worker_agent.events.dialects.wire_events import WireStored
from worker_agent.events.engine_events import EngineBatch, EngineEvent, EngineRemoved, EngineStored


def names(*hashes: int, block_size: int = 0, tier: Tier = Tier.HOST) -> EngineStored:
    return EngineStored(block_hashes=hashes, parent_block_hash=None, token_ids=(), block_size=block_size, tier=tier)


# -------------------------------------------------------------------- the batch
def test_a_batch_is_time_and_events_and_maybe_a_rank() -> None:
    for behind, dp_rank in (((), None), ((None,), None), ((0,), 0), ((3,), 3), ((3, "newer"), 3)):
        expected = EngineBatch(sequence=3, time_s=1.5, dp_rank=dp_rank, events=())
        assert BatchDecoder().decode(3, msgspec.msgpack.encode([1.5, [], *behind])) == expected


def test_any_time_that_nanoseconds_can_say_is_read() -> None:
    for time_s in (0, 0.0, 1.7e9, TIME_S_MAX):
        assert BatchDecoder().decode(0, wire(GOOD_MAP, time_s=time_s)).time_s == time_s
    assert round(TIME_S_MAX * 1e9) < 2**63


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(wire(time_s=float("nan")), id="time is no number"),
        pytest.param(wire(time_s=-1.0), id="time before 1970"),
        pytest.param(
            b"\x93\xcb\x3f\xf8" + bytes(6) + b"\x91" + b"\x91" * 200_000 + b"\xc0\x00", id="nested too deeply"
        ),
    ],
)
def test_a_batch_that_is_none_is_malformed_and_named_by_its_sequence(payload: bytes) -> None:
    with pytest.raises(MalformedMessage, match="batch 77"):
        BatchDecoder().decode(77, payload)


# -------------------------------------------------------------------- what stands
def test_every_spelling_of_a_medium_is_a_tier() -> None:
    spellings: dict[Tier, tuple[str | None, ...]] = {
        Tier.GPU: (None, "GPU", "DEVICE"),
        Tier.HOST: ("CPU", "CPU_PINNED", "CPU_TIER1"),
        Tier.DISK: ("CPU_TIER2", "DISK", "NVME", "STORAGE"),
        Tier.EXTERNAL: ("EXTERNAL", "NETWORK", "REMOTE", "SHARED"),
    }
    for tier, media in spellings.items():
        removed = EngineRemoved(block_hashes=(9,), tier=tier)
        for medium in media:
            events = stored_map(medium=medium), {**GOOD_MAP, "medium": medium}
            arrays = stored_array(None, medium), [*GOOD_MAP.values(), medium]
            assert read(*events, *arrays).events == (stored(7, tier=tier), removed) * 2, medium
    assert sorted(map(str, TIER_OF_MEDIUM)) == sorted(str(medium) for media in spellings.values() for medium in media)
    assert {TIER_OF_MEDIUM[medium]: medium for medium in MEDIUM_OF_TIER.values()} == MEDIUM_OF_TIER


def test_hashes_of_any_spelling_are_u64_inside() -> None:
    spellings: list[tuple[int | bytes, int]] = [
        (0, 0),
        (-1, 2**64 - 1),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), 2**63),
        (bytes(8), 0),
        (b"\x01" + bytes(7), 1 << 56),
        (b"\xff" * 24 + bytes(7) + b"\x05", 5),
    ]
    for spelling, inside in spellings:
        batch = read(
            stored_map(block_hashes=[spelling]),
            stored_map(block_hashes=[77], parent_block_hash=spelling),
            {**GOOD_MAP, "block_hashes": [spelling]},
            stored_array(block_hashes=[spelling]),
        )
        of_hash = stored(inside), stored(77, parent=inside), EngineRemoved(block_hashes=(inside,)), stored(inside)
        assert batch.events == of_hash, spelling


def test_blocks_without_tokens_are_names_of_known_ones_and_their_place() -> None:
    """Offloaded blocks of several attention groups: one name each, and no event says of which group."""
    for block_size in (0, 16, 4096):
        event = stored_map(block_hashes=[7, 8, 8], token_ids=[], block_size=block_size, medium="CPU")
        assert read(event).events == (names(7, 8, 8, block_size=block_size),)


def test_unknown_keys_and_slots_of_newer_publishers_are_skipped() -> None:
    newer = {"lora_id": 3, "kv_cache_spec_sliding_window": None, "session_id": "s", "new": {"a": [1]}}
    array = stored_array(3, "GPU", None, None, 0, "full_attention", None, "LOCAL", None, {"new": 1}, "newest")
    assert read(stored_map(**newer), array).events == (stored(7), stored(7))


# -------------------------------------------------------------------- what is repaired or ignored
def test_of_too_few_tokens_the_blocks_that_fit_stand() -> None:
    cases: list[tuple[list[int], list[object], EngineEvent]] = [
        ([7, 8], [1, 2, 3, 4], stored(7)),
        ([7, 8, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], stored(7, 8)),
        ([7, 8], [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]], stored(7, is_eagle=True)),
    ]
    for hashes, tokens, event in cases:
        decoder = BatchDecoder()
        assert read(stored_map(block_hashes=hashes, token_ids=tokens), decoder=decoder).events == (event,)
        assert decoder.counts["cut_blocks"] == 1


def test_what_means_nothing_to_a_prefix_is_ignored_and_counted() -> None:
    cases: list[tuple[str, object]] = [
        ("on_request", {"type": "Ignored"}),
        ("on_request", ["Ignored", 1, 2]),
        ("partial", stored_map(token_ids=[1, 2, 3])),
        ("partial", stored_map(token_ids=[[1, 2], [2, 3], [3, 4]])),
        ("not_local", stored_map(locality="REMOTE")),
        ("not_local", {**GOOD_MAP, "locality": "REMOTE"}),
        ("not_local", stored_map(locality="local")),
        ("not_local", stored_map(locality="REMOTE", medium="NEW", token_ids=[1] * 9)),
        ("not_local", [*GOOD_MAP.values(), "GPU", None, None, None, "REMOTE"]),
        ("medium", stored_map(medium="FS")),
        ("medium", {**GOOD_MAP, "medium": "OBJ"}),
        ("attention_group", stored_map(kv_cache_spec_kind="mamba")),
        ("attention_group", stored_map(group_idx=1)),
        ("attention_group", stored_map(group_idx=1, block_hashes=[], kv_cache_spec_kind="sliding_window")),
    ]
    for kind, event in cases:
        decoder = BatchDecoder()
        batch = read(GOOD_MAP, event, GOOD_MAP, decoder=decoder)
        assert (batch.events, batch.refused) == ((GOOD, GOOD), ()), event
        assert +decoder.counts - Counter(cut_blocks=1) == Counter({"removed": 2, f"ignored_{kind}": 1}), event
    assert {f"ignored_{kind}" for kind, _ in cases} == {kind for kind in KINDS if kind.startswith("ignored")}


def test_what_is_local_or_does_not_say_stands() -> None:
    for locality in (None, "LOCAL"):
        batch = read(stored_map(locality=locality, ownership="kvcr"), {**GOOD_MAP, "locality": locality})
        assert batch.events == (stored(7), GOOD)


def test_tokens_that_the_hash_covers_behind_a_block_make_bigrams() -> None:
    for lookahead in ([[5], [9]], [[5, 6], [9, 7]]):  # EAGLE; MTP of two modules
        event = stored_map(block_hashes=[7, 8], token_ids=[1, 2, 3, 4, 5, 6, 7, 8], lookahead_token_ids=lookahead)
        assert read(event).events == (stored(7, 8, is_eagle=True),)


# -------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(stored_map(medium="gpu"), id="medium in lower case"),
        pytest.param(stored_map(medium="F" * 10_000), id="endless medium"),
        pytest.param({**GOOD_MAP, "medium": "FOO"}, id="removal from an unknown medium"),
        pytest.param(stored_map(token_ids=[1, 2, 3, 4, 5]), id="too many tokens"),
        pytest.param(stored_map(token_ids=[1, 2, 3, -4]), id="negative token"),
        pytest.param(stored_map(token_ids=[[1, 2], [2, 3], [3, 4], [9, 5]]), id="pairs that are no chain"),
        pytest.param(stored_map(token_ids=[[1, 2], [2, 3], 3, [4, 5]]), id="pairs and tokens"),
        pytest.param(stored_map(token_ids=[[], [], [], []]), id="empty pairs"),
        pytest.param(stored_map(lookahead_token_ids=[[]]), id="no token behind a block"),
        pytest.param(
            stored_map(block_hashes=[7, 8], token_ids=[1] * 8, lookahead_token_ids=[[2], [1]]),
            id="a token behind a block that is not the next block's",
        ),
        pytest.param(stored_map(block_size=0), id="block size 0"),
        pytest.param(stored_map(block_hashes=[b"1234567"]), id="hash of 7 bytes"),
        pytest.param(stored_map(parent_block_hash=b""), id="parent of no bytes"),
        pytest.param({**GOOD_MAP, "block_hashes": [b"1234567"]}, id="removed hash of 7 bytes"),
        pytest.param(stored_array(block_hashes=["QUJDREVGR0hJSg=="]), id="hash as text, array"),
        pytest.param(stored_map(block_hashes=[7, 7], token_ids=[1] * 8), id="a hash twice"),
        pytest.param(stored_map(parent_block_hash=7), id="its own parent"),
        pytest.param(["BlockStored", [7], None, [1, 2, 3, 4]], id="missing slots"),
        pytest.param(["BlockRemoved"], id="removal of nothing, array"),
        pytest.param(["BlockMoved", [7]], id="unknown type, array"),
        pytest.param({}, id="empty map"),
        pytest.param(None, id="nil"),
        pytest.param(msgspec.Raw(b"\x81\xa4type\xa4\xff\xff\xff\xff"), id="text that is no UTF-8"),
        pytest.param(msgspec.Raw(b"\x81\x81\x01\x02\x03"), id="a map as a key"),
        pytest.param(msgspec.Raw(b"\xd4\x01\x00"), id="extension"),
        pytest.param(msgspec.Raw(b"\x91" * 600 + b"\xc0"), id="nested deeply"),
    ],
)
def test_one_bad_event_never_costs_its_batch(bad: object) -> None:
    batch = read(GOOD_MAP, bad, GOOD_MAP)
    assert (batch.events, batch.sequence, batch.dp_rank) == ((GOOD, GOOD), 5, 2)
    assert len(batch.refused) == 1
    assert 0 < len(batch.refused[0]) < 300


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Ignored", "GPU", "full_attention", "a" * 64])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = ("type", *WireStored.__struct_fields__, "ownership")
TAIL_SLOTS = 11


def check_the_others_stand(decoder: BatchDecoder, strange: object) -> None:
    batch = read(GOOD_MAP, strange, GOOD_MAP, decoder=decoder)
    assert (batch.events[0], batch.events[-1]) == (GOOD, GOOD)
    assert len(batch.events) + len(batch.refused) + ignored(decoder) == 3


@given(values)
def test_the_others_stand_whatever_is_in_place_of_an_event(strange: object) -> None:
    check_the_others_stand(BatchDecoder(), strange)


@given(st.sampled_from(FIELDS), values)
def test_the_others_stand_whatever_is_in_place_of_a_field(field: str, strange: object) -> None:
    check_the_others_stand(BatchDecoder(), stored_map(**{field: strange}))


@given(st.lists(values, max_size=TAIL_SLOTS), st.sampled_from([stored_array(), list(GOOD_MAP.values())]))
def test_the_others_stand_whatever_is_behind_an_array(slots: list[object], event: list[object]) -> None:
    check_the_others_stand(BatchDecoder(), [*event, *slots])


# -------------------------------------------------------------------- counts
def test_what_is_not_ignored_is_counted_once() -> None:
    decoder = BatchDecoder()
    read(
        stored_map(),
        stored_map(block_hashes=[b"12345678"]),
        stored_map(block_hashes=[7, 8]),
        stored_map(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]], block_mm_infos=[{"mm_objects": [{"mm_hash": 5}]}]),
        stored_map(token_ids=[], block_size=0),
        stored_map(extra_keys=[["salt", 1.5, b"embeddings"]]),
        {"type": "AllBlocksCleared"},
        GOOD_MAP,
        None,
        decoder=decoder,
    )
    assert decoder.counts == Counter(
        stored=6,
        removed=1,
        cleared=1,
        refused=1,
        names_only=1,
        eagle=1,
        multimodal=1,
        byte_hashes=1,
        cut_blocks=1,
        unexplained_keys=3,
    )
    assert {kind for kind in KINDS if not kind.startswith("ignored")} == (+decoder.counts).keys()
