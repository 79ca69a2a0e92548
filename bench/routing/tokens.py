"""The tokens and hashes of a trace's prompts. Block id n is the tokens n * 512, n * 512 + 1, ..., n * 512 + 511.

Where an id stands for another number of tokens, that number takes the place of 512. All tokens of all blocks differ, so
two prompts share exactly what their ids share. Every answer is made of one token that no prompt has. Hashes are the
router's own, `kv_protocol.hashing`, and the engines use them too: an engine's reports need no translation.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain as concatenated
from itertools import islice

from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest
from kv_protocol.hashing import chain, local_block_hashes
from worker_agent.engines.simulated.identity import EngineNamespace
from worker_agent.engines.simulated.tokens import TokenSource

ANSWER_TOKEN = (1 << 32) - 1


class OneToken(TokenSource, frozen=True):
    """A model that always generates the same token; it has no state to fold."""

    def fold(self, tokens: Iterable[int], state: int | None = None) -> int:
        """Return the one state."""
        del tokens, state
        return 0

    def next_token(self, state: int) -> int:
        """Return the one token."""
        del state
        return ANSWER_TOKEN


def prompt_tokens(request: TraceRequest, id_tokens: int = TRACE_BLOCK_TOKENS) -> tuple[int, ...]:
    """Return the prompt's tokens; each of its ids stands for `id_tokens`."""
    firsts = (block_id * id_tokens for block_id in request.block_ids)
    tokens = concatenated.from_iterable(range(first, first + id_tokens) for first in firsts)
    return tuple(tokens)[: request.isl_tokens]


class TraceHashes:
    """Hashes of prompts and of engines' blocks. `block_size` divides `id_tokens`."""

    def __init__(self, block_size: int, id_tokens: int = TRACE_BLOCK_TOKENS) -> None:
        self._block_size, self._id_tokens = block_size, id_tokens

    def of_prompt(self, request: TraceRequest) -> tuple[int, ...]:
        """Return the sequence hash of every full block of the prompt."""
        size, id_tokens = self._block_size, self._id_tokens
        firsts = (
            first
            for block_id in request.block_ids
            for first in range(block_id * id_tokens, (block_id + 1) * id_tokens, size)
        )
        return tuple(chain(_prompt_block_hash(first, size) for first in islice(firsts, request.isl_tokens // size)))

    def of_engine_block(self, tokens: Sequence[int], parent: int, namespace: EngineNamespace) -> int:
        """Return the sequence hash of a block; for a partial one, which is never published, a hash of the same kind."""
        del namespace  # a trace has neither adapters nor salts
        size, first = self._block_size, tokens[0]
        is_prompt_block = tokens[-1] - first == size - 1  # all of one id; answers are not made of rising tokens
        local = _prompt_block_hash(first, size) if is_prompt_block else _local_hash(tokens)
        return chain((local,), parent or None)[-1]


@cache  # every run of a process plays the same prompts: 100 bytes a block, once
def _prompt_block_hash(first: int, size: int) -> int:
    return _local_hash(range(first, first + size))


def _local_hash(tokens: Sequence[int]) -> int:
    return local_block_hashes(tokens, len(tokens))[0]
