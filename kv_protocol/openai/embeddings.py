"""A request to `/v1/embeddings` as the router reads it.

`input` is a text, a list of texts, the token ids of a text, or a list of such lists. The worker checks it:
the router hashes no prompt, since an embedding reuses no KV prefix.
Source: the OpenAI API reference, "Create embeddings"; `truncate_prompt_tokens`: vLLM,
`vllm/entrypoints/pooling/embed/protocol.py`.
"""

from typing import ClassVar

import msgspec

from kv_protocol.openai.endpoints import PATHS
from kv_protocol.openai.inbound import Inbound
from kv_protocol.openai.parts import ABSENT

EMBEDDINGS = PATHS["embeddings"]


class EmbeddingsInbound(Inbound, frozen=True, kw_only=True):
    """`POST /v1/embeddings`."""

    endpoint: ClassVar[str] = "embeddings"
    path: ClassVar[str] = EMBEDDINGS
    input: msgspec.Raw = ABSENT
