"""Conversations: prompts that begin alike, and grow by their own answers."""

from random import Random

from tests.simulation.oracle import BLOCK_SIZE
from worker_agent.port.types import EngineRequest

TOKENS_MAX = 60
CONVERSATIONS = 8
ADAPTER_SYSTEM = (1,) * (2 * BLOCK_SIZE + 2)
SYSTEMS = (ADAPTER_SYSTEM, (2,) * 6 + (3,) * 6, (3,) * 9)


class Conversation:
    """One conversation's tokens so far.

    With an adapter it may begin like one without: then two engine blocks are one of ours, for polled events name none.
    """

    def __init__(self, random: Random) -> None:
        self.system = random.choice(SYSTEMS)
        self.lora_name = random.choice([None, "adapter"]) if self.system == ADAPTER_SYSTEM else None
        self.cache_salt = random.choice([None, None, None, "salt"])
        self.tokens = self.system

    @property
    def is_alone(self) -> bool:
        """Whether no adapter's blocks can be taken for its own."""
        return self.system != ADAPTER_SYSTEM

    def request(self, request_id: str, turn: tuple[int, ...], max_tokens: int) -> EngineRequest:
        """Return the next turn."""
        return EngineRequest(
            request_id=request_id,
            prompt=self.tokens + turn,
            max_tokens=max_tokens,
            lora_name=self.lora_name,
            cache_salt=self.cache_salt,
        )


class Workload:
    """Which request comes next, and what became of those before."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.conversations = [Conversation(random) for _ in range(CONVERSATIONS)]
        self._asked: dict[str, Conversation] = {}

    def request(self) -> EngineRequest:
        """Return the next turn of some conversation, which may begin anew."""
        random = self._random
        conversation = random.choice(self.conversations)
        if len(conversation.tokens) > TOKENS_MAX or random.random() < 0.1:
            conversation.tokens = conversation.system
        turn = tuple(random.randrange(4) for _ in range(random.randrange(1, 9)))
        request_id = f"request-{len(self._asked)}"
        self._asked[request_id] = conversation
        return conversation.request(request_id, turn, random.randrange(1, 9))

    def finished(self, request: EngineRequest, tokens: tuple[int, ...]) -> None:
        """The conversation goes on from `tokens`."""
        self._asked[request.request_id].tokens = tokens
