"""A trace in memory: arrival times, lengths of prompt and answer, and the 512-token blocks of each prompt.

File: JSON lines, in the order of arrival, each an object with at least

    timestamp      ms from the trace's beginning, 0 or more, never less than before
    input_length   tokens of the prompt, 1 or more
    output_length  tokens of the answer, 1 or more
    hash_ids       one id for every 512 tokens of the prompt, the last perhaps for fewer; equal ids, equal tokens

Ids are renumbered 0, 1, ... in order of appearance: any integers are allowed. Source of the form: the Mooncake traces.

Tokens of prompts: block id n is the tokens n * 512, n * 512 + 1, ..., n * 512 + 511.

If an id stands for another number of tokens, that number takes the place of 512. All tokens of all blocks differ, so
two prompts share exactly what their ids share. Every answer is made of one token that no prompt has.
"""

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain as concatenated
from itertools import groupby
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from worker_agent.engines.simulated.tokens import TokenSource

TRACE_BLOCK_TOKENS = 512
"""Tokens that one id stands for."""
BLOCK_IDS_MAX = (1 << 32) // TRACE_BLOCK_TOKENS - 1
"""Every token of every block is a distinct u32, and one is left for answers."""


class TraceRequest(NamedTuple):
    """One request. `arrival_s` counts from the trace's beginning; `block_ids` cover the prompt's `isl_tokens`.

    `session` is what the client calls its session; empty: it names none, as in recorded traces. `limit_tokens` is its
    limit of the answer, 0: none; None: it asks for exactly the `osl_tokens` that it gets.
    """

    arrival_s: float
    isl_tokens: int
    osl_tokens: int
    block_ids: tuple[int, ...]
    session: str = ""
    limit_tokens: int | None = None


class TraceInvalid(Exception):
    """A trace cannot be used: the message has the line, the field, the found and the allowed value."""

    def __init__(self, where: str, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{where}: {field}: found {found!r}, allowed {allowed}")


class _TraceLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[int, ...]


_decoder = msgspec.json.Decoder(_TraceLine)


def load_trace(path: Path, requests_max: int | None = None) -> list[TraceRequest]:
    """Return the first `requests_max` requests (None: all) of the file at `path`.

    Raises:
        TraceInvalid: a line is malformed, or there are no lines.
    """
    numbers: dict[int, int] = {}
    requests: list[TraceRequest] = []
    before_ms = 0.0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if len(requests) == requests_max:
                break
            where = f"{path.name}:{number}"
            try:
                row = _decoder.decode(line)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                allowed = f"an object with {', '.join(_TraceLine.__struct_fields__)} ({error})"
                raise TraceInvalid(where, "line", line[:40], allowed) from error
            _check(row, before_ms, where)
            before_ms = row.timestamp
            ids = tuple(numbers.setdefault(each, len(numbers)) for each in row.hash_ids)
            requests.append(TraceRequest(row.timestamp / 1000, row.input_length, row.output_length, ids))
    if not requests:
        raise TraceInvalid(path.name, "requests", 0, "1 or more")
    if len(numbers) > BLOCK_IDS_MAX:
        raise TraceInvalid(path.name, "hash_ids", f"{len(numbers)} different ids", f"at most {BLOCK_IDS_MAX}")
    return requests


def _check(row: _TraceLine, before_ms: float, where: str) -> None:
    if row.timestamp < before_ms:
        raise TraceInvalid(where, "timestamp", row.timestamp, f"{before_ms} or more: lines come in order of arrival")
    blocks = -(-row.input_length // TRACE_BLOCK_TOKENS)
    if len(row.hash_ids) != blocks:
        allowed = f"{blocks}, one for every {TRACE_BLOCK_TOKENS} of {row.input_length} tokens"
        raise TraceInvalid(where, "hash_ids", f"{len(row.hash_ids)} ids", allowed)


def at_rate(requests: Iterable[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the same requests, arriving `rate` times as fast."""
    return [request._replace(arrival_s=request.arrival_s / rate) for request in requests]


def spread(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """Return the same requests, those of one moment spread over the time to the next; the seed decides the times.

    For traces with a coarse clock (3 s in the Mooncake traces): as recorded, their requests come in bursts that no
    client sent. Requests of the last moment stay there.
    """
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    moments = [(at_s, list(group)) for at_s, group in groupby(requests, key=lambda request: request.arrival_s)]
    nexts_s = [at_s for at_s, _ in moments[1:]] + [moments[-1][0]]
    spread_out: list[TraceRequest] = []
    for (at_s, group), next_s in zip(moments, nexts_s, strict=True):
        times_s = sorted(draw.uniform(at_s, next_s) for _ in group)
        spread_out += [each._replace(arrival_s=time_s) for each, time_s in zip(group, times_s, strict=True)]
    return spread_out


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
    """Return the prompt's tokens; each of its ids stands for `id_tokens` tokens."""
    firsts = (block_id * id_tokens for block_id in request.block_ids)
    tokens = concatenated.from_iterable(range(first, first + id_tokens) for first in firsts)
    return tuple(tokens)[: request.isl_tokens]


class PrefixTree:
    """A cache of prompt blocks by their sequence hashes; each names its whole prefix, so a set of them is a tree."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def depth(self, chain: Sequence[int]) -> int:
        """Return how many leading blocks of the chain are in the tree, which has every block's parent."""
        return bisect_left(chain, True, key=lambda each: each not in self._blocks)  # noqa: FBT003 - what is looked for

    def insert(self, chain: Sequence[int]) -> None:
        """Make the chain the most recently used; a block is always older than its parent."""
        for each in reversed(chain):
            self._blocks[each] = None
            self._blocks.move_to_end(each)

    def evict(self, blocks_max: int) -> list[int]:
        """Drop the leaves used longest ago until at most `blocks_max` blocks are left; return them in that order."""
        return [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - blocks_max)]
