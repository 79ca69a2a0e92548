"""What `llm_utils` shows. Source: `tensorrt_llm/llmapi/llm_utils.py` @ 7b437aaa; the class's documentation."""

from datetime import timedelta
from typing import Any

__all__ = ["KvCacheRetentionConfig"]


class KvCacheRetentionConfig:
    """How long a request's blocks are kept: priorities 0 to 100, by ranges of its tokens."""

    class TokenRangeRetentionConfig:
        """A range of tokens, its priority, and for how long it holds."""

        def __init__(
            self, token_start: int, token_end: int | None, priority: int, duration_ms: timedelta | None = None
        ) -> None:
            self.token_start, self.token_end = token_start, token_end
            self.priority, self.duration_ms = priority, duration_ms

    def __init__(
        self,
        token_range_retention_configs: list[Any],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
    ) -> None:
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms

    def priority_at(self, token: int) -> int:
        """Return the priority of the block that begins at `token`; not a member of the real one."""
        for each in self.token_range_retention_configs:
            if each.token_start <= token and (each.token_end is None or token < each.token_end):
                return int(each.priority)
        return self.decode_retention_priority
