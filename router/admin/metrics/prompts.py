"""Metrics of tokenization: chats encoded from a cache, waiting encodings."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, counter, gauge
from router.prompt import PromptStatistics

ENCODERS = ("byte", "hf", "fast")


def prompt_families(statistics: PromptStatistics) -> Iterator[Family]:
    """Yield the figures of encoders, of the cache, and of the threads."""
    by_encoder = [((name,), float(name == statistics.encoder)) for name in ENCODERS]
    yield gauge("encoder_info", "Who encodes prompts: 1 at one of byte, hf, fast", ("encoder",), by_encoder)
    by_knowledge = [
        (("known",), float(statistics.known_bytes)),
        (("new",), float(statistics.chat_bytes - statistics.known_bytes)),
    ]
    yield counter("chat_bytes", "Rendered chats, by whether they were encoded before", ("part",), by_knowledge)
    by_sight = [(("yes",), float(statistics.images_seen)), (("no",), float(statistics.images_unseen))]
    yield counter("prompt_images", "Images in prompts, by whether routing saw them", ("seen",), by_sight)
    for name, meaning, count in (
        (
            "encoder_failures",
            "Texts at which the fast encoder failed, and the other did not",
            statistics.encoder_failures,
        ),
        ("prompts_off_loop", "Prompts that threads made", statistics.off_loop),
        ("prompts_cancelled", "Prompts whose client left before a thread had made them", statistics.cancelled),
        ("prompts_refused", "Prompts for which too much text waited", statistics.refused),
        ("chat_cache_evictions", "Known chats that were forgotten for want of room", statistics.cache_evicted),
    ):
        yield counter(name, meaning, (), [((), float(count))])
    for name, meaning, value in (
        ("prompts_waiting_bytes", "Text that waits for a thread, or is worked on", statistics.waiting_bytes),
        ("chat_cache_bytes", "What known chats take", statistics.cache_bytes),
        ("chat_cache_chats", "Chats that are known", statistics.cache_chats),
    ):
        yield gauge(name, meaning, (), [((), float(value))])
