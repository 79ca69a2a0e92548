"""A request's prompt as tokens and sequence hashes: what it would find in a KV cache."""

from router.prompt.body import with_prompt_ids
from router.prompt.encoding_pool import EncodersBusy
from router.prompt.prompts import Prompt, PromptLimits, Prompts, PromptStatistics

__all__ = ["EncodersBusy", "Prompt", "PromptLimits", "PromptStatistics", "Prompts", "with_prompt_ids"]
