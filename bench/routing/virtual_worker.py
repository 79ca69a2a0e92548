"""The engine settings and the registration of a simulated worker in virtual time."""

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from router.fleet.registry import TextDigests
from worker_agent.port.types import EngineDescription

MODEL = "sim-8b"
TEXT = TextDigests("trace", "trace")
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192


def instance_of(worker_id: str) -> str:
    """Return the name of the worker's only life."""
    return f"{worker_id}-1"


def describe(*, kv_tokens: int, block_size: int, max_seq_len: int) -> EngineDescription:
    """Return an engine whose KV cache holds `kv_tokens` in blocks of `block_size`."""
    return EngineDescription(
        model=MODEL,
        version="virtual",
        event_source="simulated",
        block_size=block_size,
        total_kv_blocks=kv_tokens // block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_seq_len=max_seq_len,
    )


def registered(rank: WorkerRank, description: EngineDescription) -> WorkerRegistered:
    """Return the fleet event by which the worker with this one rank joins."""
    return WorkerRegistered(
        worker_id=rank.worker_id,
        instance=instance_of(rank.worker_id),
        model=MODEL,
        served_names=(MODEL,),
        base_url="http://virtual",
        block_size=description.block_size,
        hash_scheme=HASH_SCHEME,
        tokenizer_digest=TEXT.tokenizer,
        template_digest=TEXT.template,
        canary=canary(description.block_size),
        total_kv_blocks=description.total_kv_blocks,
        max_num_seqs=description.max_num_seqs,
        max_num_batched_tokens=description.max_num_batched_tokens,
        max_seq_len=description.max_seq_len,
        event_source="simulated",
    )
