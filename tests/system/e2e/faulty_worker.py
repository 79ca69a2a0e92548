"""`python -m tests.system.e2e.faulty_worker FAULT serve ...`: a worker agent that is wrong, and does not say so.

lying         its engine reports that it reused nothing
template      it puts something before each prompt, as another template would
"""

import sys
from typing import Any

from kv_protocol.hashing import pack_tokens
from tests.support.planting import inside, plant
from worker_agent.__main__ import main
from worker_agent.api.prompts import EnginePrompts
from worker_agent.engines.simulated.rank import Rank

PREAMBLE = pack_tokens(range(100, 116))


def report_no_reuse() -> None:
    """Let the engine report no cached tokens."""
    emit = inside(Rank, "_output")

    def output(self: Rank, running: Any, *generated: Any) -> Any:
        running.cached_tokens = 0
        return emit(self, running, *generated)

    plant(Rank, "_output", output)


def render_otherwise() -> None:
    """Let the agent put a preamble before each prompt."""
    packed = inside(EnginePrompts, "_packed")
    plant(EnginePrompts, "_packed", lambda self, request: [PREAMBLE + each for each in packed(self, request)])


FAULTS = {"lying": report_no_reuse, "template": render_otherwise}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
