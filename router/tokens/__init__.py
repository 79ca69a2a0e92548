"""A request's prompt as tokens and sequence hashes: what it would find in a KV cache."""

from router.tokens.body import with_prompt_ids
from router.tokens.encoding_pool import EncodersBusy
from router.tokens.prompts import Prompt, PromptLimits, Prompts, PromptStatistics

__all__ = ["EncodersBusy", "Prompt", "PromptLimits", "PromptStatistics", "Prompts", "with_prompt_ids"]
