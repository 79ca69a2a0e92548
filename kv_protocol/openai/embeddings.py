"""A request to `/v1/embeddings` as the router reads it.

`input` is a text, a list of texts, the token ids of a text, or a list of such lists. The worker checks it:
the router hashes no prompt, since an embedding reuses no KV prefix.
Source: the OpenAI API reference, "Create embeddings"; `truncate_prompt_tokens`: vLLM,
`vllm/entrypoints/pooling/embed/protocol.py`.
"""

from typing import ClassVar, Literal

import msgspec

from kv_protocol.openai.endpoints import PATHS, ApiEndpoint
from kv_protocol.openai.inbound import Inbound
from kv_protocol.openai.keys import refusing
from kv_protocol.openai.option_table import Count
from kv_protocol.openai.parts import ABSENT

EMBEDDINGS = PATHS["embeddings"]
_SHARED = frozenset({"add_special_tokens", "kv_continue", "kv_prompt_ids", "model", "nvext", "priority", "user"})
"""Keys of `Inbound` that the endpoint also has, or that are refused already."""


class EmbeddingsInbound(Inbound, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    endpoint: ClassVar[ApiEndpoint] = "embeddings"
    path: ClassVar[str] = EMBEDDINGS
    input: msgspec.Raw
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    truncate_prompt_tokens: msgspec.Raw = ABSENT

    @property
    def ineffective(self) -> tuple[str, ...]:
        """The paths of the keys in the request that have no effect here."""
        return () if self.nvext is None else tuple(self.nvext.ineffective)


_decoder = msgspec.json.Decoder(EmbeddingsInbound)
_check = refusing(frozenset(Inbound.__struct_fields__) - _SHARED)


def decode_embeddings(body: bytes | bytearray) -> EmbeddingsInbound:
    """Return the request in `body`; raise `RequestInvalid` or one of `UNDECODABLE` for anything else."""
    inbound = _decoder.decode(body)
    _check(inbound)
    return inbound
