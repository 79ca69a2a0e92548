"""What prefill servers hold for decode servers, as both kinds of doubles see it. Sources: `docs/ATTACH.md`."""

from dataclasses import dataclass, field
from typing import Any

DISAGGREGATED_KEYS = frozenset(
    {
        "request_type", "first_gen_tokens", "first_gen_log_probs", "first_gen_logits", "ctx_request_id",
        "encoded_opaque_state", "draft_tokens", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint",
        "schedule_style", "ctx_usage", "return_prompt_token_ids_b64", "resolved_thinking",
    }
)  # fmt: skip
FIRST_TOKEN = ord("a")
CHAT = "/v1/chat/completions"


@dataclass
class Contexts:
    """Computed prompts that prefill servers hold for decode servers: what was said of each, by its name.

    `enabled` says that the servers were started with a way to carry KV; `ends_at_once` that the first token is the end.
    """

    enabled: bool = True
    ends_at_once: bool = False
    held: dict[int, str] = field(default_factory=dict)
    count: int = 0

    def hold(self, name: int | None, said: str) -> int:
        self.count += 1
        name = self.count if name is None else name
        self.held[name] = said
        return name


def prompt_of(body: dict[str, Any]) -> list[int]:
    """Return a prompt's tokens: those that it has, or its letters'."""
    prompt = body.get("prompt_token_ids") or body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in body.get("messages", [])]
    return list("".join(texts).encode())


def first_answer(path: str, body: dict[str, Any], contexts: Contexts, **choice: Any) -> dict[str, Any]:
    """Return the answer with the first token alone."""
    text: dict[str, Any] = {"text": chr(FIRST_TOKEN)}
    if path == CHAT:
        text = {"message": {"role": "assistant", "content": chr(FIRST_TOKEN)}}
    reason = "stop" if contexts.ends_at_once else "length"
    prompt = len(prompt_of(body))
    return {
        "choices": [{"index": 0, **text, "finish_reason": reason, **choice}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1},
    }
