"""Refusals and encodings as metrics, each with its reason or outcome."""

from prometheus_client.core import Metric

from tests.support.image_model import PLACEHOLDER
from tests.support.manual_clock import ManualClock
from tests.support.paths import ROOT
from worker_agent.api.encode_endpoint import EncodeApi
from worker_agent.commands.served_media import encode_families, media_families
from worker_agent.media.config import MediaSection, TransferSection
from worker_agent.media.embedding_transfer import EmbeddingCache, Offers
from worker_agent.media.http_transfer import HttpEmbeddingTransfer
from worker_agent.media.image_models import ImageFacts
from worker_agent.media.loader import MediaLoader
from worker_agent.port.handoff import Handoff

PAGE = ROOT / "docs" / "TENSORRT_LLM.md"


class NoEncoder:
    async def encode(self, text: str, media: object) -> Handoff:
        raise AssertionError(f"{text} {media}")

    async def embeddings(self, text: str, media: object) -> tuple[bytes, ...]:
        raise AssertionError(f"{text} {media}")


def samples(families: list[Metric]) -> dict[tuple[str, ...], float]:
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_refusals_are_counted_by_reason() -> None:
    loader = MediaLoader(MediaSection())
    loader.refused_total["address_private"] += 2
    loader.loaded_total["image"] += 1
    loader.loaded_bytes_total = 69
    assert samples(list(media_families("w", loader))) == {
        ("kvrouter_media_loaded_total", "w", "image"): 1,
        ("kvrouter_media_loaded_bytes_total", "w"): 69,
        ("kvrouter_media_refused_total", "w", "address_private"): 2,
    }


def test_an_encode_worker_shows_what_it_keeps_and_what_waits() -> None:
    loader, cache = MediaLoader(MediaSection()), EmbeddingCache(100)
    offers: Offers[bytes] = Offers(100, 1.0)
    transfer = HttpEmbeddingTransfer(TransferSection(), ManualClock())
    facts = ImageFacts(placeholder=PLACEHOLDER, image_token_id=1)
    api = EncodeApi(NoEncoder(), loader, facts, transfer, cache, served_names=("m",), inflight_requests_max=1)
    cache.put("a", b"xy")
    assert (cache.get("a"), cache.get("b")) == (b"xy", None)
    offers.offer("t", b"xyz", 0.0)
    told = samples(list(encode_families("w", api, cache, offers)))
    assert told["kvrouter_embedding_cache_bytes", "w"] == 2
    assert told["kvrouter_embedding_offers_bytes", "w"] == 3
    assert told["kvrouter_embedding_lookups_total", "w", "hit"] == told["kvrouter_embedding_lookups_total", "w", "miss"]
    assert told["kvrouter_encode_requests_total", "w", "cancelled"] == 0
    documented = PAGE.read_text()
    assert [name for name, *_ in told if name not in documented] == []
