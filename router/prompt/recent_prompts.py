"""The token ids of recent prompts: the index has only hashes, from which no prompt can be computed.

Adding a prompt stores a reference; nothing is computed before it is read. The oldest are evicted for the newest.
Prompts with images have no ids, and are not kept.
"""

from collections import deque
from typing import NamedTuple

from router.prompt.chains import TOKEN_BYTES, EncodedPrompt

BYTES_MAX = 64 << 20
"""Some 16 million tokens: many times what a hand-over may have computed."""
ENTRY_BYTES = 512
"""Upper bound of an entry's size without its tokens and hashes."""


class RecentPrompt(NamedTuple):
    """A prompt: the requested name, its adapter and salt (empty: none), tokens and hashes."""

    model: str
    lora: str
    salt: str
    prompt: EncodedPrompt
    received_s: float


class RecentPrompts:
    """At most `bytes_max` bytes of prompts."""

    __slots__ = ("_bytes_max", "_prompts", "size_bytes")

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._prompts: deque[RecentPrompt] = deque()
        self.size_bytes = 0
        """Their size."""

    def add(self, prompt: RecentPrompt) -> None:
        """Keep the prompt; evict the oldest, or the prompt itself if it alone is too long."""
        if not prompt.prompt.tokens:
            return
        prompts = self._prompts
        prompts.append(prompt)
        size_bytes = self.size_bytes + _bytes_of(prompt)
        while size_bytes > self._bytes_max:
            size_bytes -= _bytes_of(prompts.popleft())
        self.size_bytes = size_bytes

    def newest_first(self) -> list[RecentPrompt]:
        """Return all prompts."""
        return list(reversed(self._prompts))


def _bytes_of(recent: RecentPrompt) -> int:
    return recent.prompt.token_count * TOKEN_BYTES + len(recent.prompt.sequence_hashes) + ENTRY_BYTES
