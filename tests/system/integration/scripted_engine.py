"""An engine that does to its KV cache exactly what a test says: the least that `worker_agent.port.types` asks for."""

import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from tests.support.engine_description import described
from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest, EngineStopped

BLOCK_SIZE = 2


class ScriptedEngine:
    """Emits KV events in TensorRT-LLM's JSON shape, `per_poll` at a time. Engine hashes are block numbers, negated."""

    def __init__(self, dp_ranks: tuple[int, ...] = (0,), *, per_poll: int = 1_000_000) -> None:
        self._dp_ranks = dp_ranks
        self._per_poll = per_poll
        self._events: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._next_id = dict.fromkeys(dp_ranks, 0)

    def describe(self) -> EngineDescription:
        return described(
            model="sim-8b", block_size=BLOCK_SIZE, total_kv_blocks=1000, max_seq_len=1000, dp_ranks=self._dp_ranks
        )

    async def start(self) -> None: ...

    async def run(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        nothing: tuple[EngineOutput, ...] = ()
        for output in nothing:
            yield output
        raise EngineStopped(request.request_id)

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), timeout_s)
            return [self._events.popleft() for _ in range(min(self._per_poll, len(self._events)))]

    def iteration_stats(self, timeout_s: float) -> list[dict[str, Any]]:  # noqa: ARG002 - it has none
        return []

    def store(self, *blocks: int, parent: int | None = None, dp_rank: int = 0) -> None:
        """Block n is the tokens n, n; so equal chains are equal content."""
        self.emit(
            {
                "type": "stored",
                "parent_hash": None if parent is None else -parent,
                "blocks": [{"block_hash": -block, "tokens": [{"token_id": block}] * BLOCK_SIZE} for block in blocks],
            },
            dp_rank,
        )

    def remove(self, *blocks: int, dp_rank: int = 0) -> None:
        self.emit({"type": "removed", "block_hashes": [-block for block in blocks]}, dp_rank)

    def emit(self, data: dict[str, Any], dp_rank: int = 0) -> None:
        with self._changed:
            event_id = self._next_id[dp_rank]
            self._next_id[dp_rank] += 1
            self._events.append({"event_id": event_id, "attention_dp_rank": dp_rank, "data": data})
            self._changed.notify_all()

    def skip(self, ids: int, dp_rank: int = 0) -> None:
        """So many events of the rank are made, and lost."""
        self._next_id[dp_rank] += ids

    @property
    def is_polled_dry(self) -> bool:
        with self._changed:
            return not self._events


def tokens_of(blocks: Sequence[int]) -> list[int]:
    """Return the tokens of these blocks."""
    return [block for block in blocks for _ in range(BLOCK_SIZE)]
