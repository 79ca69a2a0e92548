"""The description of a small engine, for tests to which most of its figures do not matter, and handoffs of engines."""

from typing import Any

import msgspec

from worker_agent.port.handoff import Handoff, read_handoff
from worker_agent.port.types import EngineDescription


def described(**changed: Any) -> EngineDescription:
    """Return a simulated engine with 64 blocks of 4 tokens, and what a test says otherwise."""
    fields: dict[str, Any] = {
        "model": "m",
        "version": "1",
        "event_source": "simulated",
        "block_size": 4,
        "total_kv_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_seq_len": 200,
        "kv_cache_dtype": "simulated",
    }
    return EngineDescription(**fields | changed)


def handoff_of_json(data: bytes) -> Handoff:
    """Return the handoff in a JSON object, which there is."""
    handoff = read_handoff(msgspec.Raw(data))
    assert handoff is not None
    return handoff
