"""The beginnings and ends of prompts, for people who look into decisions; kept if `control.keep_text` is set.

They are only in memory: neither the journal nor the log has them. Token ids are kept; `text` and `excerpt` decode them.
Prompts with images, and those that the mode does not encode, have no ids, and are not kept. Pure.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

HEAD_TOKENS, TAIL_TOKENS = 512, 512
PROMPTS_MAX = 1 << 14
"""64 MiB of token ids; the oldest prompts are dropped."""
_TOKEN_BYTES = 4


class PromptText(msgspec.Struct, frozen=True):
    """A prompt's text; `omitted_tokens` between `head` and `tail` are left out. A short prompt has only a head."""

    head: str
    tail: str
    omitted_tokens: int


class _Kept(NamedTuple):
    head: bytes
    tail: bytes
    omitted_tokens: int


class KeptPrompts:
    """The prompts of the newest decisions, by the decisions' ids."""

    def __init__(self, decode: Callable[[Iterable[int]], str]) -> None:
        """`decode` returns the text of token ids."""
        self._decode = decode
        self._kept = OrderedDict[str, _Kept]()

    def keep(self, decision_id: str, ids: bytes) -> None:
        """Keep the beginning and the end of a decision's prompt, token ids as little-endian u32s."""
        if not ids:
            return
        head, rest = ids[: HEAD_TOKENS * _TOKEN_BYTES], ids[HEAD_TOKENS * _TOKEN_BYTES :]
        tail = rest[-TAIL_TOKENS * _TOKEN_BYTES :]
        self._kept[decision_id] = _Kept(head, tail, (len(rest) - len(tail)) // _TOKEN_BYTES)
        if len(self._kept) > PROMPTS_MAX:
            self._kept.popitem(last=False)

    def text(self, decision_id: str) -> PromptText | None:
        """Return the text of a decision's prompt; None if it is not kept."""
        kept = self._kept.get(decision_id)
        return None if kept is None else PromptText(self._text(kept.head), self._text(kept.tail), kept.omitted_tokens)

    def excerpt(self, decision_id: str, start: int, tokens: int) -> str | None:
        """Return the text of `tokens` or fewer tokens of a prompt's kept head, from `start` on; None: none are kept."""
        kept = self._kept.get(decision_id)
        ids = b"" if kept is None else kept.head[start * _TOKEN_BYTES : (start + tokens) * _TOKEN_BYTES]
        return self._text(ids) if ids else None

    def _text(self, ids: bytes) -> str:
        return self._decode(array("I", ids))
