"""Prompts as decisions read them: tokens, and chains of sequence hashes; and their ids in a worker's body.

A chain is packed: little-endian u64s of a prompt's full blocks, in their order. A sequence hash names its block and all
before it, so equal hashes mean equal prefixes.

Recent prompts are kept for hand-overs: the index has only hashes, from which no prompt can be computed. Adding a prompt
stores a reference, and computes nothing. The oldest are evicted for the newest. If `control.keep_text` is set, parts of
prompts are also kept for people. Prompts with images, and those that the mode does not encode, have no ids, and are not
kept.
"""

import base64
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

import msgspec

from kv_protocol.body_limits import Bytes
from kv_protocol.hashing import Hashing

TOKEN_BYTES = 4
BLOCK_BYTES = 8
_IDS_OPENING, _IDS_CLOSING = b'{"kv_prompt_ids":"', b'",'
BYTES_MAX = 64 << 20
"""About 16 million tokens, of all workers: enough, as a hand-over looks only for prompts that a single worker holds."""
ENTRY_BYTES = 512
"""Upper bound of an entry's size without its tokens and hashes."""
HEAD_TOKENS, TAIL_TOKENS = 512, 512
PROMPTS_MAX = 1 << 14
"""Prompts that are kept for people: 64 MiB of token ids. The oldest are dropped."""


def block_count(chain: bytes) -> int:
    """Return how many blocks `chain` has."""
    return len(chain) // BLOCK_BYTES


class EncodedPrompt(msgspec.Struct, frozen=True, gc=False):
    """Tokens, and the sequence hashes of their full blocks as little-endian u64s.

    tokens           ids as little-endian u32s, or strings whose code points are the ids; empty if only the worker
                     knows them (images), or for several prompts
    token_count      a lower bound if only the worker knows the ids; the sum of several prompts
    sequence_hashes  those of the blocks that are known
    unrendered       the field for which the router cannot render the prompt (the hashes are of the text then), or ""
    """

    tokens: bytes | tuple[str, ...]
    token_count: int
    hashing: Hashing
    sequence_hashes: bytes
    unrendered: str = ""

    @property
    def ids(self) -> bytes:
        """The tokens as little-endian u32s."""
        tokens = self.tokens
        return tokens if isinstance(tokens, bytes) else "".join(tokens).encode("utf-32-le")

    def beginning(self, blocks: int) -> "EncodedPrompt":
        """Return the prompt's beginning: this many blocks, and one more token if there is one.

        With that token all of these blocks are reusable, and a hash window that looks ahead by a token is full.
        """
        count = min(self.token_count, blocks * self.hashing.block_size + 1)
        ids, hashes = self.ids[: count * TOKEN_BYTES], self.sequence_hashes[: blocks * BLOCK_BYTES]
        return EncodedPrompt(ids, count, self.hashing, hashes)


def with_prompt_ids(body: Bytes, ids: bytes) -> tuple[Bytes | memoryview, ...]:
    """Return the JSON object `body` in parts, with `kv_prompt_ids` as its first key; the rest is unchanged.

    `ids` are little-endian u32s. The body is not copied; white space before the object is left out.
    """
    rest = memoryview(body)[body.index(b"{") + 1 :]
    return (_IDS_OPENING, base64.b64encode(ids), _IDS_CLOSING, rest)


class RecentPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt's tokens and hashes, the name of the requested model, and its adapter and salt (empty: none)."""

    model: str
    lora: str
    salt: str
    prompt: EncodedPrompt
    received_s: float


class RecentPrompts:
    """The newest prompts, at most `bytes_max` bytes of them."""

    __slots__ = ("_bytes_max", "_prompts", "size_bytes")

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._prompts: deque[tuple[int, RecentPrompt]] = deque()
        self.size_bytes = 0
        """Size of the kept prompts."""

    def add(self, prompt: RecentPrompt) -> None:
        """Keep the prompt; evict the oldest, or the prompt itself if it alone is too long."""
        encoded = prompt.prompt
        if encoded.tokens:
            size = encoded.token_count * TOKEN_BYTES + len(encoded.sequence_hashes) + ENTRY_BYTES
            self._prompts.append((size, prompt))
            self.size_bytes += size
            while self.size_bytes > self._bytes_max:
                self.size_bytes -= self._prompts.popleft()[0]

    def newest_first(self) -> list[RecentPrompt]:
        """Return all prompts."""
        return [prompt for _, prompt in reversed(self._prompts)]


class PromptText(msgspec.Struct, frozen=True):
    """A prompt's text; `omitted_tokens` between `head` and `tail` are left out. A short prompt has only a head."""

    head: str
    tail: str
    omitted_tokens: int


class KeptPrompts:
    """The beginnings and ends of the newest decisions' prompts, for people who look into decisions.

    They are only in memory: neither the journal nor the log has them. Prompts without ids are not kept.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str]) -> None:
        """`decode` returns the text of token ids."""
        self._decode = decode
        self._kept = OrderedDict[str, tuple[bytes, bytes, int]]()
        """Head, tail, and the number of tokens between them."""

    def keep(self, decision_id: str, ids: bytes) -> None:
        """Keep the beginning and the end of a decision's prompt, token ids as little-endian u32s."""
        if not ids:
            return
        head, rest = ids[: HEAD_TOKENS * TOKEN_BYTES], ids[HEAD_TOKENS * TOKEN_BYTES :]
        tail = rest[-TAIL_TOKENS * TOKEN_BYTES :]
        self._kept[decision_id] = head, tail, (len(rest) - len(tail)) // TOKEN_BYTES
        if len(self._kept) > PROMPTS_MAX:
            self._kept.popitem(last=False)

    def text(self, decision_id: str) -> PromptText | None:
        """Return the text of a decision's prompt; None if it is not kept."""
        kept = self._kept.get(decision_id)
        return None if kept is None else PromptText(self._text(kept[0]), self._text(kept[1]), kept[2])

    def excerpt(self, decision_id: str, start: int, tokens: int) -> str | None:
        """Return the text of `tokens` or fewer tokens of a prompt's kept head, from `start` on; None: none are kept."""
        head = self._kept.get(decision_id, (b"",))[0]
        ids = head[start * TOKEN_BYTES : (start + tokens) * TOKEN_BYTES]
        return self._text(ids) if ids else None

    def _text(self, ids: bytes) -> str:
        return self._decode(array("I", ids))
