"""The encoder's thread, run by the test itself for a counted number of texts."""

import threading

from router.prompt.prompts import ModelPrompts


class StopAfter(threading.Event):
    """Is set once it was looked at `looks` times, as a worker's loop looks at it before each piece of work."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def encode_one(prompts: ModelPrompts) -> None:
    """Do the first piece of work that waits for the encoder's threads."""
    prompts.pool.work(StopAfter(1))
