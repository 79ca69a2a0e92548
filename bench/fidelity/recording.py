"""A recorded workload: what clients sent to a fleet of engines, and how a request fared.

A session's first prompt is a shared system prompt and added tokens; every further one is the prompt before it and added
tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class RecordingInvalid(Exception):
    """A recording cannot be used: the message has the place, the found and the allowed value."""

    def __init__(self, where: str, found: object, allowed: str) -> None:
        super().__init__(f"{where}: found {found!r}, allowed {allowed}")


class Answered(NamedTuple):
    """One request as its client saw it; times count from the moment of sending."""

    isl_tokens: int
    cached_tokens: int
    ttft_s: float
    e2e_s: float
    worker: int
    turn: int


class Session(msgspec.Struct, frozen=True):
    """One conversation: the number of its system prompt, and the added and output tokens of each turn."""

    system: Annotated[int, msgspec.Meta(ge=0)]
    added_tokens: tuple[Count, ...]
    output_tokens: tuple[Count, ...]

    def prompts_tokens(self, system_tokens: Sequence[int]) -> Iterator[int]:
        """Yield the length of each turn's prompt."""
        tokens = system_tokens[self.system]
        for added in self.added_tokens:
            tokens += added
            yield tokens


class Recording(NamedTuple):
    """A workload on engines with `blocks_per_worker` blocks of `block_size` tokens; clients send until `sending_s`."""

    blocks_per_worker: int
    block_size: int
    concurrency: int
    system_tokens: tuple[int, ...]
    sessions: tuple[Session, ...]
    sending_s: float

    @property
    def sequence_tokens_max(self) -> int:
        """The longest prompt together with its answer."""
        return max(
            prompt_tokens + output_tokens
            for session in self.sessions
            for prompt_tokens, output_tokens in zip(
                session.prompts_tokens(self.system_tokens), session.output_tokens, strict=True
            )
        )
