"""`python -m tests.system.e2e.faulty_worker FAULT serve ...`: a worker agent that is wrong, and does not say so.

lying         its engine reports that it reused nothing
boasting      its engine reports that it reused the whole prompt
template      it puts something before each prompt, as another template would
block_size    its engine's blocks have 32 tokens, and it registers blocks of 16
"""

import sys
from collections.abc import Callable
from typing import Any

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import canary, pack_tokens
from tests.support.planting import inside, plant
from worker_agent.__main__ import main
from worker_agent.api.prompts import EnginePrompts
from worker_agent.commands import serve
from worker_agent.engines.simulated.rank import Rank

BLOCK_SIZE, ITS_OWN = 16, 32
PREAMBLE = pack_tokens(range(100, 100 + BLOCK_SIZE))


def report(cached_tokens: Callable[[Any], int]) -> None:
    """Let the engine report other cached tokens of a running request."""
    emit = inside(Rank, "_output")

    def output(self: Rank, running: Any, logprobs: Any) -> Any:
        running.cached_tokens = cached_tokens(running)
        return emit(self, running, logprobs)

    plant(Rank, "_output", output)


def render_otherwise() -> None:
    """Let the agent put a preamble before each prompt."""
    packed = inside(EnginePrompts, "_packed")
    plant(EnginePrompts, "_packed", lambda self, request: [PREAMBLE + each for each in packed(self, request)])


def register_another_block_size() -> None:
    """Let the agent register blocks of `BLOCK_SIZE`, whatever the engine has."""

    def registered(**fields: Any) -> WorkerRegistered:
        return WorkerRegistered(**fields | {"block_size": BLOCK_SIZE, "canary": canary(BLOCK_SIZE)})

    plant(serve, "WorkerRegistered", registered)


FAULTS: dict[str, Callable[[], None]] = {
    "lying": lambda: report(lambda _: 0),
    "boasting": lambda: report(lambda running: len(running.request.prompt) - 1),
    "template": render_otherwise,
    "block_size": register_another_block_size,
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
