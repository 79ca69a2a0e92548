"""Metrics of media: of every worker that accepts media, and of encode workers."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.media.embedding_cache import EmbeddingCache
from worker_agent.media.encode_api import EncodeApi
from worker_agent.media.loader import MediaLoader
from worker_agent.media.offers import OfferStatistics


def media_families(worker: str, loader: MediaLoader) -> Iterator[Family]:
    """Yield the counts of requests' media."""
    loaded = [((worker, kind), float(count)) for kind, count in dict(loader.loaded_total).items()]
    yield counter("media_loaded", "Media loaded for requests, by kind", ("worker", "kind"), loaded)
    meaning = "Bytes of media loaded for requests"
    yield counter("media_loaded_bytes", meaning, ("worker",), [((worker,), float(loader.loaded_bytes_total))])
    refused = [((worker, reason), float(count)) for reason, count in dict(loader.refused_total).items()]
    yield counter("media_refused", "Requests refused because of their media, by reason", ("worker", "reason"), refused)


def encode_families(worker: str, api: EncodeApi, cache: EmbeddingCache, offers: OfferStatistics) -> Iterator[Family]:
    """Yield an encode worker's requests, cache and offers."""
    outcomes = [((worker, outcome), float(count)) for outcome, count in api.requests_total.items()]
    yield counter("encode_requests", "Encoding requests, by outcome", ("worker", "outcome"), outcomes)
    at, kept = (worker,), cache.statistics()
    yield gauge("encode_inflight_requests", "Prompts being encoded", ("worker",), [(at, float(api.running))])
    for name, meaning, value in (
        ("embedding_cache_bytes", "Memory of cached embeddings", kept.size_bytes),
        ("embedding_offers_bytes", "Memory of embeddings that wait to be fetched", offers.size_bytes),
    ):
        yield gauge(name, meaning, ("worker",), [(at, float(value))])
    lookups = (("hit", kept.hits_total), ("miss", kept.misses_total))
    samples = [((worker, outcome), float(count)) for outcome, count in lookups]
    yield counter("embedding_lookups", "Lookups in the cache of embeddings, by outcome", ("worker", "outcome"), samples)
    ends = ("taken", "released", "expired", "refused")
    samples = [((worker, end), float(getattr(offers, f"{end}_total"))) for end in ends]
    yield counter("embedding_offers", "Offered embeddings, by outcome", ("worker", "outcome"), samples)
