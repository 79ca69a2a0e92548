"""The model: the next token is a pure function of all tokens before it, so that a text that is cut may go on anywhere.

    token(tokens) = FIRST + (crc32(tokens as i64, little-endian) + 7919 * s) mod SPAN

s is the number of the sequence among `best_of`; letters of the byte tokenizer, so that text can be compared and
no token ends a sequence by chance. So it does not matter which engine computed the prompt's blocks, or whether any did:
caches, transfers and other workers do not change the text.

Logits, made only for requests that read them: the next token has 10.0, the runner-up k of nine stands 17 * k tokens on,
with 10 - k, all others have 0. After processors have changed them in place, the highest wins, the lowest id first.
"""

import math
import zlib
from typing import Any

import numpy as np

FIRST = 3 + ord("a")
SPAN = 26
RUNNERS_UP = 9


def next_token(tokens: list[int], sequence: int = 0) -> int:
    """Return the token that follows these."""
    return FIRST + (zlib.crc32(np.asarray(tokens, dtype="<i8").tobytes()) + 7919 * sequence) % SPAN


def logits_of(token: int, vocab_size: int) -> Any:
    """Return the logits that make `token` the next one: f32, shape (1, 1, vocab_size)."""
    logits = np.zeros((1, 1, max(vocab_size, FIRST + SPAN, token + 1)), dtype=np.float32)
    for rank in range(RUNNERS_UP, 0, -1):
        logits[0, 0, FIRST + (token - FIRST + 17 * rank) % SPAN] = 10 - rank
    logits[0, 0, token] = 10
    return logits


def winner(logits: Any) -> int:
    """Return the token of the highest logit."""
    return int(np.argmax(logits))


def top_logprobs(logits: Any, token: int, count: int) -> dict[int, tuple[float, int]]:
    """Return log probability and rank, from 1, of the `count` most probable tokens, and of `token`."""
    row = np.asarray(logits, dtype=np.float64).reshape(-1)
    total = float(row.max()) + math.log(float(np.exp(row - row.max()).sum()))
    order = np.argsort(-row, kind="stable")[: max(1, count)]
    found = {int(each): (float(row[each]) - total, rank) for rank, each in enumerate(order, start=1)}
    if token not in found:
        found[token] = (float(row[token]) - total, int((row > row[token]).sum()) + 1)
    return found
