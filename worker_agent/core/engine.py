"""What an engine is asked and what it answers, whichever engine it is, and how it says no."""

from typing import Literal

import msgspec

from worker_agent.core.disaggregated import Handoff
from worker_agent.core.media import Media
from worker_agent.core.sampling import Sampling, TokenLogprobs

FinishReason = Literal["length", "stop", "error"]
PRIORITY_DEFAULT = 35
PRIORITY_MAX = 100
"""Retention priorities of blocks. Source: `event_plane.md` section 1.3."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is; sizes in tokens, blocks of `block_size` tokens per rank, or requests per rank."""

    model: str
    version: str
    event_source: Literal["trtllm", "simulated"]
    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_seq_len: int
    dp_ranks: tuple[int, ...] = (0,)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `prompt` is not empty; prompt and `max_tokens` together fit in `max_seq_len`.

    Without `dp_rank` the engine chooses the rank. An empty LoRA name or salt is an absent one. `priority`, 0..100, says
    how long its blocks are to be kept: the lowest give way first.

    What follows `priority` not every engine knows; one that does not, ignores it. `queue_priority`, 0..1: of the
    requests that wait, the highest goes first. `handoff` is what the worker before this one said; `transfer_id`, unique
    in the fleet, names the transfer that a prefill worker begins. On a decode worker `serves_alone` asks for the whole
    generation, without anybody's handoff. `logits_processors` are names of the engine's configuration. `media` are the
    prompt's, in their order there.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    dp_rank: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    priority: int = PRIORITY_DEFAULT
    sampling: Sampling = Sampling()
    queue_priority: float | None = None
    handoff: Handoff | None = None
    transfer_id: int | None = None
    serves_alone: bool = False
    logits_processors: tuple[str, ...] = ()
    media: tuple[Media, ...] = ()


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a generation. `cached_tokens` says how many of the prompt were not computed again.

    `choice` counts from 0; each has a finish reason of its own. The token that stopped it is among its tokens.
    `logprobs`, where asked for, has one entry for each new token, None where nothing is known of it; `prompt_logprobs`
    stands on the first output alone. `stop_token_id` is the one that stopped it, where the engine says so. `handoff` is
    what the next worker needs.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int
    finish_reason: FinishReason | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    stop_token_id: int | None = None
    handoff: Handoff | None = None


class EngineError(Exception):
    """The engine did not do as asked."""


class RequestRefused(EngineError):
    """The request's own fault: the message names the field, what was found and what is allowed."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{field}: found {found!r}, allowed {allowed}")
        self.field = field


class EngineStopped(EngineError):
    """The engine stopped before the generation ended."""
