"""Encodes a rendered chat from the position where it is new. Plain functions, for any thread.

The text is encoded in stretches that end at marks, so that it can be known up to each; a stretch has at least
`STRETCH_CHARACTERS`, but the last mark always ends one, since there the next turn goes on.
"""

from kv_runtime.text.tokenizer_model import TokenizerText
from router.prompt.body import base64_of
from router.prompt.prefix_cache import CachedChat, Cut, Known

STRETCH_CHARACTERS = 256
_TOKEN_BYTES = 4
_TEXT_BYTES, _TEXT_CHARACTERS = 3, 4


def encode_chat(text: TokenizerText, rendered: bytes, known: Known | None) -> CachedChat:
    """Return the complete chat with its ids; the `known` part is not encoded again."""
    start = known.cut.at if known else 0
    parts: list[bytes | memoryview] = [known.ids] if known else []
    cuts = list(known.chat.cuts[: known.cut_count]) if known else []
    tokens = known.cut.tokens if known else 0
    new = rendered[start:].decode()
    is_ascii = new.isascii()
    stretches = _stretches(text.mark_spans(new))
    byte_at, character_at = start, 0
    for begin, end in [*stretches, (len(new), len(new))]:
        if begin > character_at:
            stretch = new[character_at:begin]
            packed = text.pack_marked(stretch)
            parts.append(packed)
            tokens += len(packed) // _TOKEN_BYTES
            byte_at += begin - character_at if is_ascii else len(stretch.encode())
            character_at = begin
        if end > begin > 0:
            cuts.append(Cut(byte_at, byte_at + len(new[begin:end].encode()), tokens))
    ids = b"".join(parts)
    return CachedChat(rendered, ids, _encoded(ids, known), tuple(cuts))


def _stretches(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those of the marks, begin and end of each, before which a stretch ends."""
    chosen, last = [], 0
    for place in stretches[:-1]:
        if place[0] - last >= STRETCH_CHARACTERS:
            chosen.append(place)
            last = place[0]
    return chosen + stretches[-1:]


def _encoded(ids: bytes, known: Known | None) -> bytes:
    """Return the ids in base64; the beginning may be known."""
    if known is None:
        return base64_of(ids)
    begun = known.encoded
    return b"".join((begun, base64_of(memoryview(ids)[len(begun) // _TEXT_CHARACTERS * _TEXT_BYTES :])))
