"""Captures: what a file may say, and the caches that its frames make, step by step."""

import gzip
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.capture import command as capture_module
from bench.capture.command import Capture, CapturedCaches, CapturedFrame, CaptureUnreadable, load_capture
from kv_protocol.hashing import sequence_hashes
from worker_agent.events.consolidation import Consolidation


def request(**changed: Any) -> dict[str, Any]:
    return {"n": 0, "round": 0, "t": 5.0, "prompt": [1, 2, 3], "cached": 0, "output": [4], **changed}


def frame(sequence: int, dp_rank: int | None = None) -> list[Any]:
    payload = msgspec.msgpack.encode([1.5, [], dp_rank])
    return [1.0, [b"kv-events", sequence.to_bytes(8, "big"), payload]]


def whole(**changed: Any) -> dict[str, Any]:
    return {"block_size": 16, "num_blocks": 9, "seed": 1, "reset": True, "frames": [], "requests": [], **changed}


def written(path: Path, content: Any) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else msgspec.msgpack.encode(content))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CaptureUnreadable) as refused:
        load_capture(path)
    return str(refused.value)


def test_plain_and_packed_captures_are_the_same(tmp_path: Path) -> None:
    content = whole(frames=[frame(7)], requests=[request()])
    plain = load_capture(written(tmp_path / "plain", content))
    packed = load_capture(written(tmp_path / "packed", gzip.compress(msgspec.msgpack.encode(content))))
    assert plain == packed
    assert plain.frames == (CapturedFrame(1.0, 7, msgspec.msgpack.encode([1.5, [], None])),)


def test_rounds_come_in_their_order_and_end_with_their_last_request(tmp_path: Path) -> None:
    requests = [request(round=9, t=30), request(round=2, t=10), request(round=2, t=11, prompt=[7])]
    read = load_capture(written(tmp_path / "c", whole(requests=requests)))
    assert [(each.end_s, len(each.requests)) for each in read.rounds] == [(11.0, 2), (30.0, 1)]


def test_what_is_not_used_may_be_absent_or_new(tmp_path: Path) -> None:
    bare = {key: value for key, value in request().items() if key not in ("n", "output")}
    content = {"block_size": 16, "frames": [], "requests": [bare], "host_blocks": 100}
    assert len(load_capture(written(tmp_path / "c", content)).rounds) == 1


def test_sequences_that_go_back_are_of_one_publisher_a_rank(tmp_path: Path) -> None:
    several = [frame(4), frame(4, dp_rank=2), frame(5), frame(5, dp_rank=2), [1.0, [b"", (6).to_bytes(8, "big"), b"?"]]]
    read = load_capture(written(tmp_path / "several", whole(frames=several)))
    assert [(each.publisher, each.sequence) for each in read.frames] == [(0, 4), (2, 4), (0, 5), (2, 5), (0, 6)]
    assert read.publishers == (0, 2)
    mixed = [frame(4), frame(5, dp_rank=2), frame(6)]
    assert load_capture(written(tmp_path / "one", whole(frames=mixed))).publishers == (None,)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"block_size": 0}, "block_size"),
        ({"frames": [[1.0, [b"t", b"1234", b""]]]}, "sequence frame of 4 bytes, 8 needed"),
        ({"frames": [[1.0, [b"t", b"12345678"]]]}, "frames[0][1]"),
        ({"frames": [[float("nan"), [b"t", bytes(8), b""]]]}, "frames[0][0]"),
        ({"frames": [frame(3), frame(3)]}, "sequence of frame 1: found 3, allowed 4.."),
        (
            {"frames": [frame(0), frame(0, dp_rank=1), frame(1), frame(0, dp_rank=1)]},
            "of frame 3: found 0, allowed 1..",
        ),
        ({"frames": [frame(0), frame(0, dp_rank=5000)]}, "dp_rank: found 5000"),
        ({"frames": [frame(1 << 40)]}, "sequence of frame 0: found 1099511627776, allowed 0.."),
        ({"requests": [request(cached=-1)]}, "requests[0].cached"),
        ({"requests": [request(cached=4)]}, "cached: found 4, allowed 0..3, the prompt's tokens - at `$.requests[0]`"),
        ({"requests": [request(prompt=[1 << 32])]}, "requests[0].prompt[0]"),
    ],
)
def test_a_refusal_names_the_file_the_place_and_what_is_wrong(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    path = written(tmp_path / "broken.msgpack", whole(**changed))
    said = refusal(path)
    assert (str(path) in said, words in said) == (True, True), said


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_no_more_is_unpacked_than_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any) -> None:
    content = msgspec.msgpack.encode(whole(num_blocks="x" * 1000))
    monkeypatch.setattr(capture_module, "CAPTURE_BYTES_MAX", len(content))
    load_capture(written(tmp_path / "fits", pack(content)))
    monkeypatch.setattr(capture_module, "CAPTURE_BYTES_MAX", len(content) - 1)
    assert f"allowed {len(content) - 1} bytes unpacked" in refusal(tmp_path / "fits")


def test_a_payload_that_no_socket_would_bring_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "PAYLOAD_BYTES_MAX", 11)
    said = refusal(written(tmp_path / "c", whole(frames=[frame(0)])))
    assert "payload of frame 0: found '12 bytes', allowed 11" in said


BLOCK_SIZE = 4


def stored(first: int, blocks: int, **changed: Any) -> dict[str, Any]:
    """A store of `blocks` blocks with engine hashes from `first`, whose tokens are all the hash of their block."""
    hashes = list(range(first, first + blocks))
    tokens = [block for block in hashes for _ in range(BLOCK_SIZE)]
    fields = {"block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens, "block_size": BLOCK_SIZE}
    return {"type": "BlockStored", **fields, "medium": "GPU", **changed}


def removed(*hashes: int, **changed: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **changed}


def frames(*payloads: Any) -> list[CapturedFrame]:
    return [CapturedFrame(0.0, at, msgspec.msgpack.encode(payload)) for at, payload in enumerate(payloads)]


def one_batch(*events: dict[str, Any], dp_rank: int | None = 0) -> list[Any]:
    return [1.0, list(events), dp_rank]


def prompt(*blocks: int) -> list[int]:
    return sequence_hashes([block for block in blocks for _ in range(BLOCK_SIZE)], BLOCK_SIZE)


def overlaps(captured: list[CapturedFrame], *blocks: int) -> list[int]:
    """Return the overlap of a prompt after each step."""
    caches = CapturedCaches(Capture(BLOCK_SIZE, tuple(captured), ()))
    return [caches.overlap(prompt(*blocks)) for frame in captured for _ in caches.steps(frame)]


def test_every_block_of_a_store_and_of_a_removal_is_a_step() -> None:
    captured = frames(one_batch(stored(1, 3), removed(3, 2)), one_batch(removed(1)))
    assert overlaps(captured, 1, 2, 3) == [1, 2, 3, 2, 1, 0]


def test_a_hole_ends_the_overlap_and_a_refill_restores_it() -> None:
    captured = frames(one_batch(stored(1, 3), removed(2), stored(2, 1, parent_block_hash=1)))
    assert overlaps(captured, 1, 2, 3) == [1, 2, 3, 1, 3]


def test_a_block_that_moves_to_another_tier_stays_in_the_overlap() -> None:
    captured = frames(one_batch(stored(1, 2), stored(1, 2, medium="CPU", token_ids=[]), removed(1, 2)))
    assert overlaps(captured, 1, 2) == [1, 2, 2, 2, 2, 2]


def test_publishers_of_single_ranks_count_and_lose_for_themselves() -> None:
    (first,), (second,) = frames(one_batch(stored(1, 1))), frames(one_batch(stored(2, 1), dp_rank=3))
    later = CapturedFrame(0.0, 2, msgspec.msgpack.encode(one_batch(stored(4, 1), dp_rank=None)))
    captured = [first._replace(publisher=0), second._replace(publisher=3), later._replace(publisher=3)]
    caches = CapturedCaches(Capture(BLOCK_SIZE, tuple(captured), ()))
    steps = [changed for frame in captured for changed in caches.steps(frame)]
    assert steps == [{*prompt(1)}, {*prompt(2)}, {*prompt(2)}, {*prompt(4)}]
    assert [set(caches.held(rank)) for rank in (0, 3)] == [{*prompt(1)}, {*prompt(4)}]


def test_a_hole_in_the_recording_clears_all_ranks() -> None:
    first, _, third = frames(one_batch(stored(1, 2)), one_batch(removed(1)), one_batch(stored(5, 1)))
    assert overlaps([first, third], 1, 2) == [1, 2, 0, 0]
    assert overlaps([third], 5) == [1]


# ---------------------------------------------------------------- any events

HASHES = st.integers(1, 6)
MEDIUM = st.sampled_from(["GPU", "CPU", "DISK", None])
MAIN_GROUP = st.integers(0, 1).map(lambda group: {"group_idx": group, "kv_cache_spec_kind": "full_attention"})
CHAINS = st.tuples(st.lists(HASHES, min_size=1, max_size=4), st.none() | HASHES, MEDIUM, MAIN_GROUP, st.booleans())
EVENT = (
    CHAINS.map(
        lambda drawn: {
            **stored(0, 0, medium=drawn[2], **drawn[3]),
            "block_hashes": drawn[0],
            "parent_block_hash": drawn[1],
            "token_ids": [] if drawn[4] else [each % 3 for each in drawn[0] for _ in range(BLOCK_SIZE)],
        }
    )
    | st.tuples(st.lists(HASHES, max_size=4), MEDIUM, MAIN_GROUP).map(
        lambda drawn: removed(*drawn[0], medium=drawn[1], **drawn[2])
    )
    | st.just({"type": "AllBlocksCleared"})
)


@given(st.lists(st.lists(EVENT, max_size=6), max_size=8))
def test_after_each_frame_the_caches_hold_what_a_consolidator_dumps(batches: list[list[dict[str, Any]]]) -> None:
    captured = frames(*(one_batch(*events) for events in batches))
    caches, epochs = CapturedCaches(Capture(BLOCK_SIZE, tuple(captured), ())), count()
    consolidation = Consolidation((0,), BLOCK_SIZE, "i", lambda: next(epochs))
    for frame in captured:
        for changed in caches.steps(frame):
            assert changed
        consolidation.on_payload(frame.sequence, frame.payload)
        assert caches.held(0) == {each.sequence_hash: each.tier_bits for each in consolidation.mirrors[0].dump()}
