"""Metrics of tokenization: text encoded before, waiting encodings."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, by_name, counter, gauge
from kv_runtime.text.encoders import KeptSegments
from router.prompt.prompts import ModelPrompts

ENCODERS = ("byte", "hf", "fast", "none")


def prompt_families(prompts: ModelPrompts) -> Iterator[Family]:
    """Yield the figures of encoders, of the cache, and of the threads."""
    encoder, pool = prompts.encoder, prompts.pool
    kept = encoder.kept() if encoder else KeptSegments()
    told = "1 for the encoder in use: byte, hf (tokenizers), fast (fastokens), or none"
    encoders = {name: name == prompts.encoder_name for name in ENCODERS}
    yield gauge("encoder_info", told, ("encoder",), by_name((), encoders))
    meaning = "Bytes of text: encoded for an earlier prompt, or new"
    yield counter("encoder_bytes", meaning, ("part",), by_name((), {"known": kept.hit_bytes, "new": kept.miss_bytes}))
    images = {"yes": prompts.images_seen, "no": prompts.images_unseen}
    meaning = "Images in prompts: hashed for routing (yes) or not (no)"
    yield counter("prompt_images", meaning, ("seen",), by_name((), images))
    meaning = "Prompts that only the worker knows, by the key of the request that is why"
    yield counter("prompts_unrendered", meaning, ("key",), by_name((), prompts.unrendered))
    for kind, name, meaning, value in (
        (counter, "encoder_failures", "Texts that the fast encoder failed at; hf encoded them",
         encoder.failures if encoder else 0),
        (counter, "prompts_off_loop", "Prompts encoded by threads", pool.submitted),
        (counter, "prompts_cancelled", "Prompts dropped because their client left before they were encoded",
         pool.cancelled),
        (counter, "prompts_refused", "Prompts refused because too much text waited to be encoded", pool.refused),
        (gauge, "prompts_waiting_bytes",
         "Bytes of request bodies, without images, that wait for an encoding thread or are in one", pool.waiting_bytes),
        (gauge, "encoder_cache_bytes", "Memory of segments of chats that are kept with their ids", kept.bytes),
        (gauge, "encoder_cache_segments", "Segments that are kept", kept.entries),
    ):  # fmt: skip
        yield kind(name, meaning, rows=[((), value)])
