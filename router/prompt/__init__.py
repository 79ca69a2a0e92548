"""A request's prompt as tokens and sequence hashes, with which a KV cache is looked up."""

from router.prompt.body import with_prompt_ids
from router.prompt.encoding_pool import EncodersBusy
from router.prompt.prompts import Prompt, PromptLimits, Prompts, PromptStatistics

__all__ = ["EncodersBusy", "Prompt", "PromptLimits", "PromptStatistics", "Prompts", "with_prompt_ids"]
