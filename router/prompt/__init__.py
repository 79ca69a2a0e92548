"""A request's prompt as tokens and sequence hashes, with which a KV cache is looked up."""

from router.prompt.body import with_prompt_ids
from router.prompt.encoding_pool import EncodersBusy
from router.prompt.prompts import EncodedPrompt, ModelPrompts, PromptLimits, PromptStatistics

__all__ = ["EncodedPrompt", "EncodersBusy", "ModelPrompts", "PromptLimits", "PromptStatistics", "with_prompt_ids"]
