"""Reading captures: what is taken, and how it is said what is wrong with one."""

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.capture import command as capture_module
from bench.capture.command import CapturedFrame, CaptureUnreadable, load_capture


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
    assert plain.frames == (CapturedFrame(1.0, b"kv-events", 7, msgspec.msgpack.encode([1.5, [], None])),)


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
