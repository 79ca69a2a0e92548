"""Placeholders of media in an agent's prompts; block hashes use `kv_protocol/mm_keys.py`."""

from collections.abc import Sequence

from kv_protocol.mm_keys import MmKey, MmRun, expanded, keys_of_blocks, mm_block_hashes
from worker_agent.media.refusals import MediaRefused

__all__ = ["MmKey", "MmRun", "check_placeholders", "expanded", "keys_of_blocks", "mm_block_hashes"]


def check_placeholders(prompt: Sequence[int], image_token_id: int, items: int, field: str) -> None:
    """Raise `MediaRefused` unless the prompt, not yet expanded, has the image's token once an item.

    Additional ones come from the client's text, and would get other items' features.
    """
    found = prompt.count(image_token_id)
    if found != items:
        raise MediaRefused("placeholder", field, f"{found} image tokens in the prompt", f"{items}, one an image")
