"""The next token is a pure, seeded function of all tokens before it.

    state = mixed seed;  state' = state * M + token + 1 mod 2^64;  next token = vocabulary[mixed state * its length]

So a stream cut anywhere and sent again as prompt + tokens so far goes on as if it had never been cut.
"""

from collections.abc import Iterable

import msgspec

from kv_protocol.splitmix import U64_MASK, choice_index, splitmix64

_MULTIPLIER = 0x5851_F42D_4C95_7F2D  # Source: Knuth's MMIX generator, TAOCP volume 2, 3.3.4
LETTERS_AND_SPACES = tuple(b"abcdefghijklmnopqrstuvwxyz     ")
"""Ids of the byte tokenizer: words of about five letters."""


class TokenSource(msgspec.Struct, frozen=True):
    """The simulated model. A token that `vocabulary` names more than once is drawn as much more often."""

    seed: int = 0
    vocabulary: tuple[int, ...] = LETTERS_AND_SPACES

    def fold(self, tokens: Iterable[int], state: int | None = None) -> int:
        """Return the state after `tokens`, which follow those of `state` (None: begin); O(1) per token."""
        state = splitmix64(self.seed) if state is None else state
        for token in tokens:
            state = state * _MULTIPLIER + token + 1 & U64_MASK
        return state

    def next_token(self, state: int) -> int:
        """Return the token that follows the prefix of `state`."""
        return self.vocabulary[choice_index(state, len(self.vocabulary))]
