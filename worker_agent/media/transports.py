"""Which transport carries embeddings: by the settings, and by what is installed."""

from importlib.util import find_spec

from kv_runtime.clock import Clock
from worker_agent.media.config import EmbeddingTransferSection
from worker_agent.media.http_transfer import HttpEmbeddingTransfer
from worker_agent.media.nixl_transfer import NixlEmbeddingTransfer


def embedding_transfer(
    section: EmbeddingTransferSection, clock: Clock
) -> HttpEmbeddingTransfer | NixlEmbeddingTransfer:
    """Return the transport, which is not started: start it, then run its `parts`."""
    has_nixl = section.over == "auto" and find_spec("nixl") is not None
    if section.over == "nixl" or has_nixl:
        return NixlEmbeddingTransfer(section, clock)
    return HttpEmbeddingTransfer(section, clock)
