"""Conversations: prompts that begin alike, and grow by their own answers."""

from random import Random

from kv_protocol.hashing import sequence_hashes
from tests.simulation.oracle import BLOCK_SIZE
from worker_agent.core.engine import EngineRequest

TOKENS_MAX = 60
CONVERSATIONS = 8


class Conversation:
    """One conversation's tokens so far. Those of an adapter begin like those of the base model, engine blocks do not."""

    def __init__(self, random: Random) -> None:
        self.lora_name = random.choice([None, None, "adapter"])
        self.cache_salt = random.choice([None, None, None, "salt"])
        self.system = tuple(random.choice([[1] * 10, [1] * 6 + [2] * 6, [3] * 9]))
        self.tokens = self.system


class Workload:
    """Which request comes next, and what became of those before."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._conversations = [Conversation(random) for _ in range(CONVERSATIONS)]
        self._asked: dict[str, Conversation] = {}
        self._count = 0

    def request(self) -> EngineRequest:
        """Return the next turn of some conversation."""
        random = self._random
        conversation = random.choice(self._conversations)
        turn = tuple(random.randrange(4) for _ in range(random.randrange(1, 9)))
        if len(conversation.tokens) > TOKENS_MAX or random.random() < 0.1:
            conversation.tokens = conversation.system
        self._count += 1
        request = EngineRequest(
            request_id=f"r{self._count}",
            prompt=conversation.tokens + turn,
            max_tokens=random.randrange(1, 9),
            lora_name=conversation.lora_name,
            cache_salt=conversation.cache_salt,
        )
        self._asked[request.request_id] = conversation
        return request

    def finished(self, request: EngineRequest, tokens: list[int]) -> None:
        """The conversation goes on from `tokens`."""
        self._asked.pop(request.request_id).tokens = tuple(tokens)

    def sample(self) -> list[int]:
        """Return the sequence hashes of some conversation, for a question to the index."""
        conversation = self._random.choice(self._conversations)
        return sequence_hashes(conversation.tokens, BLOCK_SIZE, cache_salt=conversation.cache_salt)
