"""Metrics of tokenization: text encoded before, waiting encodings."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, counter, gauge
from router.prompt import PromptStatistics

ENCODERS = ("byte", "hf", "fast", "none")


def prompt_families(statistics: PromptStatistics) -> Iterator[Family]:
    """Yield the figures of encoders, of the cache, and of the threads."""
    by_encoder = [((name,), float(name == statistics.encoder)) for name in ENCODERS]
    told = "1 for the encoder in use: byte, hf (tokenizers), fast (fastokens), or none"
    yield gauge("encoder_info", told, ("encoder",), by_encoder)
    kept = statistics.kept
    by_knowledge = [(("known",), float(kept.hit_bytes)), (("new",), float(kept.miss_bytes))]
    yield counter("encoder_bytes", "Bytes of text: encoded for an earlier prompt, or new", ("part",), by_knowledge)
    by_sight = [(("yes",), float(statistics.images_seen)), (("no",), float(statistics.images_unseen))]
    yield counter("prompt_images", "Images in prompts: hashed for routing (yes) or not (no)", ("seen",), by_sight)
    unrendered = [((key,), float(count)) for key, count in statistics.unrendered.items()]
    yield counter(
        "prompts_unrendered",
        "Prompts that only the worker knows, by the key of the request that is why",
        ("key",),
        unrendered,
    )
    for name, meaning, count in (
        (
            "encoder_failures",
            "Texts that the fast encoder failed at; hf encoded them",
            statistics.encoder_failures,
        ),
        ("prompts_off_loop", "Prompts encoded by threads", statistics.off_loop),
        (
            "prompts_cancelled",
            "Prompts dropped because their client left before they were encoded",
            statistics.cancelled,
        ),
        ("prompts_refused", "Prompts refused because too much text waited to be encoded", statistics.refused),
    ):
        yield counter(name, meaning, (), [((), float(count))])
    for name, meaning, value in (
        ("prompts_waiting_bytes", "Text that waits for a thread or is being encoded", statistics.waiting_bytes),
        ("encoder_cache_bytes", "Memory of segments of chats that are kept with their ids", kept.bytes),
        ("encoder_cache_segments", "Segments that are kept", kept.entries),
    ):
        yield gauge(name, meaning, (), [((), float(value))])
