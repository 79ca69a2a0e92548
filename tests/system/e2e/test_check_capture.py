"""`indexer check-capture`, as typed: its figures are those of an oracle that shares no line with the product.

The golden capture is the first 40 rounds of one that was recorded from vLLM 0.24.0. Its token ids are relabelled along
the trie of all token sequences, so that the blocks and every figure are those of the recording, and the file is small.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.capture.command import Capture, CapturedCaches, CaptureFigures, checked, load_capture
from tests.support.forked import Ended, forked
from tests.support.paths import RECORDINGS

GOLDEN = RECORDINGS / "capture_bs32.msgpack.gz"
GOLDEN_FIGURES = {
    "requests": 487,
    "exact": 480,
    "explained": 487,
    "under": 3,
    "over": 4,
    "missing_parent": 0,
    "duplicate": 0,
    "unknown_removal": 0,
}


def run(*arguments: str) -> Ended:
    return forked("-m", "indexer", "check-capture", *arguments)


def figures_of(capture: Capture) -> CaptureFigures:
    return checked(capture, CapturedCaches(capture))


# ---------------------------------------------------------------- the command


def test_the_command_finds_what_the_oracle_finds() -> None:
    done = run(str(GOLDEN), "--json")
    assert (done.code, done.err) == (0, "")
    assert list(json.loads(done.out).items()) == list(GOLDEN_FIGURES.items())


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"nothing of the kind", "allowed: a capture"), (GOLDEN.read_bytes()[:1000], "ended")],
)
def test_a_file_that_is_no_capture_ends_with_code_2_and_a_message(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "broken.msgpack.gz"
    if content is not None:
        path.write_bytes(content)
    done = run(str(path), "--json")
    assert (done.code, done.out) == (2, "")
    assert str(path) in done.err
    assert words in done.err
    assert "Traceback" not in done.err


# ---------------------------------------------------------------- other setups than the recorded ones

SLIDING = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **changed: Any) -> dict[str, Any]:
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 4}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", "lora_name": None, **changed}


def removed(hashes: list[Any], **changed: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **changed}


def tokens(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def request(number: int, prompt: list[int], cached: int) -> dict[str, Any]:
    return {"n": 0, "round": number, "t": 10.0 * (number + 1), "prompt": prompt, "cached": cached, "output": [1]}


def written(
    path: Path, frames: Sequence[tuple[float, int | None, list[Any]]], requests: list[dict[str, Any]], *, first: int = 5
) -> Path:
    """Write a capture whose frames are (time, rank, events)."""
    wire = [
        [time_s, [b"kv-events", (at + first).to_bytes(8, "big"), msgspec.msgpack.encode([time_s, events, dp_rank])]]
        for at, (time_s, dp_rank, events) in enumerate(frames)
    ]
    capture = {"block_size": 4, "num_blocks": 99, "seed": 0, "reset": False, "frames": wire, "requests": requests}
    path.write_bytes(msgspec.msgpack.encode(capture))
    return path


def test_host_tier_windows_ranks_bytes_and_clears_are_read(tmp_path: Path) -> None:
    key = bytes(range(24)) + (77).to_bytes(8, "big")
    frames = [
        (1.0, 0, [stored([1, 2], tokens(1, 8)), stored([11, 12], tokens(1, 8), **SLIDING)]),
        (12.0, 0, [stored([1, 2], [], medium="CPU", block_size=0), removed([1, 2]), removed([11], group_idx=1)]),
        (25.0, 1, [stored([key, 8], tokens(101, 108))]),
        (26.0, 1, [stored([9], tokens(109, 112), parent=8)]),
        (51.0, 0, [{"type": "AllBlocksCleared"}, {"type": "SomethingNew"}]),
        (
            52.0,
            None,
            [stored([3], tokens(1, 4), block_size=4), stored([3], tokens(1, 4)), stored([5], tokens(5, 8), 4)],
        ),
        (53.0, 0, [removed([9])]),
    ]
    requests = [
        request(0, [], 0),
        request(0, tokens(1, 3), 0),
        request(0, tokens(1, 9), 0),
        request(0, tokens(1, 9), 4),
        request(0, tokens(1, 9), 12 - 3),
        request(1, tokens(1, 8), 4),
        request(1, tokens(1, 9), 8),
        request(2, tokens(1, 9), 8),
        request(4, tokens(101, 113), 12),
        request(4, tokens(101, 113), 77 - 73),
        request(5, tokens(1, 9), 0),
        request(5, tokens(1, 9), 4),
        request(6, tokens(1, 9), 4),
    ]
    figures = figures_of(load_capture(written(tmp_path / "c", frames, requests)))
    assert figures == CaptureFigures(
        requests=13, exact=8, explained=11, under=2, over=3, missing_parent=1, duplicate=1, unknown_removal=1
    )


def test_a_prompt_that_ends_within_a_block_is_counted_to_its_last_block(tmp_path: Path) -> None:
    requests = [request(0, [], 0), request(1, tokens(1, 9), 8), request(1, tokens(1, 9), 9)]
    frames = [(1.0, 0, [stored([1, 2], tokens(1, 8))])]
    figures = figures_of(load_capture(written(tmp_path / "c", frames, requests, first=0)))
    assert (figures.exact, figures.under) == (2, 1)


def test_a_hole_in_the_recording_is_a_loss_and_the_rest_is_read(tmp_path: Path) -> None:
    frames = [(1.0, 0, [stored([1], tokens(1, 4))]), (2.0, 0, []), (12.0, 0, [stored([2], tokens(5, 8))])]
    requests = [request(0, tokens(1, 5), 0), request(1, tokens(1, 5), 4), request(2, tokens(1, 5), 0)]
    capture = load_capture(written(tmp_path / "c", frames, requests))
    holed = capture._replace(frames=(capture.frames[0], capture.frames[2]))
    assert figures_of(holed) == CaptureFigures(requests=3, exact=3, explained=3)


def test_a_publisher_a_rank_is_played_by_a_publisher_a_rank(tmp_path: Path) -> None:
    frames = [(1.0, 0, [stored([1], tokens(1, 4))]), (11.0, 0, [removed([1])]), (21.0, 0, [])]
    requests = [
        request(0, [], 0),
        request(1, tokens(1, 9), 8),
        request(2, tokens(1, 9), 8),
        request(3, tokens(1, 9), 8),
    ]
    one = load_capture(written(tmp_path / "c", frames, requests))
    other = load_capture(written(tmp_path / "d", [(2.0, 1, [stored([1, 2], tokens(1, 8))])], [], first=0))
    both = [each._replace(publisher=0) for each in one.frames] + [each._replace(publisher=1) for each in other.frames]
    capture = one._replace(frames=tuple(sorted(both)))
    assert capture.publishers == (0, 1)
    assert figures_of(capture) == CaptureFigures(requests=4, exact=4, explained=4)
    assert figures_of(one) == CaptureFigures(requests=4, exact=1, explained=1, under=3)
