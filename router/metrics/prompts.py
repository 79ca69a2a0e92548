"""Metrics of tokenization: text encoded before, waiting encodings."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, by_name, counter, gauge
from router.prompt.prompts import PromptStatistics

ENCODERS = ("byte", "hf", "fast", "none")


def prompt_families(statistics: PromptStatistics) -> Iterator[Family]:
    """Yield the figures of encoders, of the cache, and of the threads."""
    kept = statistics.kept
    told = "1 for the encoder in use: byte, hf (tokenizers), fast (fastokens), or none"
    encoders = {name: name == statistics.encoder for name in ENCODERS}
    yield gauge("encoder_info", told, ("encoder",), by_name((), encoders))
    meaning = "Bytes of text: encoded for an earlier prompt, or new"
    yield counter("encoder_bytes", meaning, ("part",), by_name((), {"known": kept.hit_bytes, "new": kept.miss_bytes}))
    images = {"yes": statistics.images_seen, "no": statistics.images_unseen}
    meaning = "Images in prompts: hashed for routing (yes) or not (no)"
    yield counter("prompt_images", meaning, ("seen",), by_name((), images))
    meaning = "Prompts that only the worker knows, by the key of the request that is why"
    yield counter("prompts_unrendered", meaning, ("key",), by_name((), statistics.unrendered))
    for kind, name, meaning, value in (
        (counter, "encoder_failures", "Texts that the fast encoder failed at; hf encoded them",
         statistics.encoder_failures),
        (counter, "prompts_off_loop", "Prompts encoded by threads", statistics.off_loop),
        (counter, "prompts_cancelled", "Prompts dropped because their client left before they were encoded",
         statistics.cancelled),
        (counter, "prompts_refused", "Prompts refused because too much text waited to be encoded", statistics.refused),
        (gauge, "prompts_waiting_bytes", "Text that waits for a thread or is being encoded", statistics.waiting_bytes),
        (gauge, "encoder_cache_bytes", "Memory of segments of chats that are kept with their ids", kept.bytes),
        (gauge, "encoder_cache_segments", "Segments that are kept", kept.entries),
    ):  # fmt: skip
        yield kind(name, meaning, rows=[((), value)])
