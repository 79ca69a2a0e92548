"""What a context worker hands to a generation worker, and an encode worker to a context worker.

Source: `tensorrt_llm/disaggregated_params.py`, and the class's page of the 1.3 documentation (`SURFACE.md`).
"""

import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
HASH_WORDS = 8


class DisaggScheduleStyle(IntEnum):
    """Which side a request goes to first."""

    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """`request_type` in any case, of `REQUEST_TYPES`; multimodal hashes are 8 ints each, one list for each handle."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: DisaggScheduleStyle | None = None
    ctx_usage: dict[str, Any] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in REQUEST_TYPES:
                raise ValueError(
                    f"Unknown request type: {self.request_type}. Must be context_only, generation_only or "
                    "context_and_generation"
                )
        if self.multimodal_embedding_handles is not None:
            self._check_hashes(len(self.multimodal_embedding_handles))

    def _check_hashes(self, handles: int) -> None:
        if self.multimodal_hashes is None:
            assert handles > 0, "multimodal_embedding_handles must be provided"
            words = [secrets.randbelow(2**32 - 1) - 2**31 for _ in range(HASH_WORDS)]
            self.multimodal_hashes = [words] * handles
            return
        assert handles == len(self.multimodal_hashes), (
            "multimodal_embedding_handles and multimodal_hashes must have the same length"
        )
        for words in self.multimodal_hashes:
            assert isinstance(words, list), "mm_hash must be a list"
            assert len(words) == HASH_WORDS, "mm_hash must be a list of 8 integers"
            assert all(isinstance(word, int) for word in words), "mm_hash must contain integers"
