"""The wire of engine events: frames (`batches.py` reads the payloads, in all dialects).

    frames  = topic | sequence, 8 bytes big-endian, counts batches of one publisher from 0 | payload
    payload = msgpack [ts (s since 1970), events, dp_rank]; an event is a map with the key `type`
    replay  : to a ROUTER [empty | first sequence wanted]; per batch that is still there it answers
              [empty | topic | sequence | payload], then the end marker: sequence 2^64 - 1, empty payload

Source: `docs/SOURCES.md` E3.1, E3.2, E3.6.
"""

from collections.abc import Sequence

from kv_protocol.errors import MalformedMessage

REPLAY_END = (1 << 64) - 1
PAYLOAD_BYTES_MAX = 16 << 20
"""Bound on frames, which sockets keep: 2^18 blocks of 8 tokens, ten times what an engine stores in one step."""
_SEQUENCE_BYTES = 8
_FRAMES = 3


def encode_sequence(sequence: int) -> bytes:
    """Return the sequence frame."""
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")


def decode_sequence(frame: bytes) -> int:
    """Return the number in a sequence frame; raise `MalformedMessage` if it is not one."""
    if len(frame) != _SEQUENCE_BYTES:
        raise MalformedMessage(0, f"sequence frame of {len(frame)} bytes, {_SEQUENCE_BYTES} needed")
    return int.from_bytes(frame, "big")


def split_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence and payload of a published message; raise `MalformedMessage` for other shapes."""
    if len(frames) != _FRAMES:
        raise MalformedMessage(0, f"{len(frames)} frames, {_FRAMES} needed: topic, sequence, payload")
    return decode_sequence(frames[1]), frames[2]


def split_replay(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence and payload of a replayed message, with or without its topic; raise `MalformedMessage`."""
    if len(frames) not in (_FRAMES, _FRAMES + 1) or frames[0]:
        raise MalformedMessage(0, f"{len(frames)} frames, 3 or 4 needed: empty, [topic], sequence, payload")
    return decode_sequence(frames[-2]), frames[-1]
