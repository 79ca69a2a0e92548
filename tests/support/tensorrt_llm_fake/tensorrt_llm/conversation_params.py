"""Which conversation a request belongs to. Source: `tensorrt_llm/conversation_params.py` @ 30d2c50c."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ConversationParams:
    """The conversation's id: not empty; blanks around it are dropped."""

    conversation_id: str

    def __post_init__(self) -> None:
        stripped = str(self.conversation_id or "").strip()
        if not stripped:
            raise ValueError("conversation_id must be non-empty")
        self.conversation_id = stripped
