"""The next token is a pure, seeded function of all tokens before it.

    state = mixed seed;  state' = state * M + token + 1 mod 2^64;  next token = letter[u(state) * letters], u in [0, 1)

So if a stream is cut, and the prompt is sent again with the tokens so far, the answer continues as if it had not been
cut. Each choice but the first has a seed of its own. Requested log probabilities are made up:

    p(next token) = 1 - (1 + u(mixed state)) / 4, in (1/2, 3/4];  p(runner-up k) = (1 - p) / 2^k, other tokens in turn
"""

from collections.abc import Iterable
from math import log

import msgspec

from kv_protocol.splitmix import U64_MASK, choice_index, splitmix64, unit_interval
from worker_agent.port.sampling import TokenLogprob, TokenLogprobs

_MULTIPLIER = 0x5851_F42D_4C95_7F2D  # Source: Knuth's MMIX generator, TAOCP volume 2, 3.3.4
LETTERS_AND_SPACES = tuple(b"abcdefghijklmnopqrstuvwxyz     ")
"""Ids of the byte tokenizer: words of about five letters. A space is listed, and so drawn, five times as often."""


class TokenSource(msgspec.Struct, frozen=True):
    """The simulated model, which generates `LETTERS_AND_SPACES`."""

    seed: int = 0

    def fold(self, tokens: Iterable[int], state: int | None = None) -> int:
        """Return the state after `tokens`, which follow those of `state` (None: begin); O(1) per token."""
        state = splitmix64(self.seed) if state is None else state
        for token in tokens:
            state = state * _MULTIPLIER + token + 1 & U64_MASK
        return state

    def next_token(self, state: int) -> int:
        """Return the token that follows the prefix of `state`."""
        return LETTERS_AND_SPACES[choice_index(state, len(LETTERS_AND_SPACES))]

    def of_choice(self, choice: int) -> "TokenSource":
        """Return the model of one of several choices, counted from 0."""
        return msgspec.structs.replace(self, seed=splitmix64(self.seed + choice & U64_MASK)) if choice else self

    def logprobs(self, state: int, top: int) -> TokenLogprobs:
        """Return the log probabilities of the token after the prefix of `state`, and of the `top` most likely."""
        token, left = self.next_token(state), (1 + unit_interval(splitmix64(state))) / 4
        others = [each for each in dict.fromkeys(LETTERS_AND_SPACES) if each != token]
        first = choice_index(splitmix64(state), len(others))
        ranked = [TokenLogprob(token_id=token, logprob=log(1 - left), rank=1)]
        for place in range(min(top - 1, len(others))):
            left /= 2
            other = others[(first + place) % len(others)]
            ranked.append(TokenLogprob(token_id=other, logprob=log(left), rank=place + 2))
        return TokenLogprobs(chosen=ranked[0], top=tuple(ranked[:top]))


class ScriptedSource(TokenSource, frozen=True, kw_only=True):
    """Generates `script` repeatedly, for tests and demonstrations; it should end with an end token.

    The state is how many first tokens of the script the prefix ends with, so that a cut stream continues from there.
    """

    script: tuple[int, ...]

    def fold(self, tokens: Iterable[int], state: int | None = None) -> int:
        """Return the state after `tokens`, which follow those of `state` (None: begin)."""
        place, script = state or 0, self.script
        for token in tokens:
            place %= len(script)
            place = place + 1 if token == script[place] else int(token == script[0])
        return place

    def next_token(self, state: int) -> int:
        """Return the token that follows the first `state` tokens of the script."""
        return self.script[state % len(self.script)]
