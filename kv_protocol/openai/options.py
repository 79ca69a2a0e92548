"""Keys of both endpoints' requests besides `Options` (`option_table.py`), for routers and worker agents.

`nvext` is the extension of NVIDIA Dynamo's clients; `NvExt.ineffective` names those of its keys that have no effect
here. Source: `docs/SOURCES.md` D7.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from kv_protocol.openai.option_table import I64, CacheSalt, Count
from kv_protocol.openai.parts import ABSENT, is_given
from kv_protocol.openai.prompts import read_ids

Rank = Annotated[int, msgspec.Meta(ge=0, le=4095)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3.6e6)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]

_MS_PER_S = 1000


def template_options(**options: object) -> dict[str, Any]:
    """Return the options for rendering a chat (`ChatOptions`) that the client set."""
    return {name: value for name, value in options.items() if value is not None}


class AgentHints(msgspec.Struct, frozen=True):
    """Hints of an agent about its request. `osl` is the expected length of the response, in tokens."""

    priority: I64 | None = None
    strict_priority: U32 | None = None
    osl: Count | None = None
    speculative_prefill: bool | None = None


class Targets(msgspec.Struct, frozen=True):
    """Latency targets in milliseconds: the first token, and each later one."""

    ttft_target: Milliseconds | None = None
    itl_target: Milliseconds | None = None

    @property
    def ttft_target_s(self) -> float | None:
        """The target of the first token, in seconds."""
        return None if self.ttft_target is None else self.ttft_target / _MS_PER_S

    @property
    def itl_target_s(self) -> float | None:
        """The target of each later token, in seconds."""
        return None if self.itl_target is None else self.itl_target / _MS_PER_S


NO_TARGETS = Targets()
_NO_HINTS = AgentHints()


class NvExt(msgspec.Struct, frozen=True):
    """The extension, as far as it is read here; a worker gets all of it.

    `token_data` is the prompt as token ids, in place of messages or text.
    """

    backend_instance_id: str | int | None = None
    prefill_worker_id: str | int | None = None
    decode_worker_id: str | int | None = None
    dp_rank: Rank | None = None
    prefill_dp_rank: Rank | None = None
    token_data: msgspec.Raw = ABSENT
    cache_salt: CacheSalt | None = None
    agent_hints: AgentHints | None = None
    router: Targets | None = None
    annotations: list[str] | None = None
    extra_fields: list[str] | None = None
    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    max_thinking_tokens: U32 | None = None

    def prompt_ids(self) -> bytes | None:
        """Return `token_data` as little-endian u32s, None if there is none; raise `RequestInvalid`."""
        return read_ids(self.token_data, "nvext.token_data") if is_given(self.token_data) else None

    @property
    def hints(self) -> AgentHints:
        """The hints; empty ones if there are none."""
        return self.agent_hints or _NO_HINTS

    @property
    def ineffective(self) -> Iterator[str]:
        """The paths of the keys in it that have no effect, in the order of their names."""
        if self.hints.speculative_prefill is not None:
            yield "nvext.agent_hints.speculative_prefill"
        for key in ("annotations", "extra_fields", "greed_sampling", "max_thinking_tokens", "use_raw_prompt"):
            if getattr(self, key) is not None:
                yield f"nvext.{key}"


NO_NVEXT = NvExt()
