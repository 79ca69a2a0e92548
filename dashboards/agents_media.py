"""A row of the dashboard "Worker agents": media."""

from dashboards.panels import Panel, Query, Row
from dashboards.promql import WORKER, rate, selected

MEDIA = Row(
    "Are media loaded and encoded?",
    (
        Panel(
            title="Media loaded",
            description="kvrouter_media_loaded_total by kind; at the right kvrouter_media_loaded_bytes_total. Many for "
            "few requests: clients send the same media again; name them, so that they are known.",
            queries=(
                Query(rate("media_loaded_total", WORKER, by="kind"), "{{kind}}"),
                Query(rate("media_loaded_bytes_total", WORKER), "bytes", right=True),
            ),
            unit="cps",
        ),
        Panel(
            title="Media refused",
            description="kvrouter_media_refused_total by reason. address_*, path_*: a client tries what it may not; "
            "text_only: the model takes no media, or --modality multimodal is missing.",
            queries=(Query(rate("media_refused_total", WORKER, by="reason"), "{{reason}}"),),
            unit="cps",
        ),
        Panel(
            title="Encode workers",
            description="kvrouter_encode_requests_total by outcome; at the right kvrouter_encode_inflight_requests. "
            "failed: the worker's log says why; many in flight: add encode workers.",
            queries=(
                Query(rate("encode_requests_total", WORKER, by="outcome"), "{{outcome}}"),
                Query(f"sum by (worker) ({selected('encode_inflight_requests', WORKER)})", "{{worker}}", right=True),
            ),
            unit="reqps",
        ),
        Panel(
            title="Cache of embeddings",
            description="kvrouter_embedding_lookups_total by outcome; at the right kvrouter_embedding_cache_bytes. Few "
            "hits though media repeat: the cache is too small.",
            queries=(
                Query(rate("embedding_lookups_total", WORKER, by="outcome"), "{{outcome}}"),
                Query(f"sum by (worker) ({selected('embedding_cache_bytes', WORKER)})", "{{worker}} bytes", right=True),
            ),
            unit="cps",
            width=12,
        ),
        Panel(
            title="Embeddings that wait to be fetched",
            description="kvrouter_embedding_offers_total by outcome; at the right kvrouter_embedding_offers_bytes. "
            "expired: the worker that asked did not fetch them; is it gone?",
            queries=(
                Query(rate("embedding_offers_total", WORKER, by="outcome"), "{{outcome}}"),
                Query(
                    f"sum by (worker) ({selected('embedding_offers_bytes', WORKER)})", "{{worker}} bytes", right=True
                ),
            ),
            unit="cps",
            width=12,
        ),
    ),
)
