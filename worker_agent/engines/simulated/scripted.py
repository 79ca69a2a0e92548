"""A model that answers one given text to everything, for tests and demonstrations.

The next token depends on the tokens before it: on the longest beginning of the text that they end with. So a stream
that was cut, and is sent again as prompt and tokens so far, continues where it was.

Source: Knuth, Morris, Pratt: Fast pattern matching in strings (1977).
"""

from collections.abc import Iterable, Sequence

from worker_agent.engines.simulated.tokens import TokenSource


class ScriptedSource(TokenSource, frozen=True, kw_only=True):
    """Generates `script` repeatedly; the state is the length of its longest beginning that the tokens end with."""

    script: tuple[int, ...]
    borders: tuple[int, ...]
    """For each beginning of the script: the length of the longest shorter beginning that it ends with."""

    def fold(self, tokens: Iterable[int], state: int | None = None) -> int:
        """Return the state after `tokens`, which follow those of `state` (None: begin)."""
        state = state or 0
        for token in tokens:
            state = _after(self.script, self.borders, state, token)
        return state

    def next_token(self, state: int) -> int:
        """Return the token that follows the first `state` tokens of the script."""
        return self.script[state % len(self.script)]


def scripted(script: Sequence[int], vocabulary: tuple[int, ...] = TokenSource().vocabulary) -> ScriptedSource:
    """Return the model that generates `script`, which is not empty and should end with an end token."""
    borders = [0, 0]
    for at in range(1, len(script)):
        borders.append(_after(script, borders, borders[at], script[at]))
    return ScriptedSource(script=tuple(script), borders=tuple(borders), vocabulary=vocabulary)


def _after(script: Sequence[int], borders: Sequence[int], state: int, token: int) -> int:
    while state and (state == len(script) or script[state] != token):
        state = borders[state]
    return state + 1 if script[state] == token else 0
