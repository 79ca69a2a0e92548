"""Queue of recovery questions about one rank: they are answered one at a time, and each of them once.

asker           the inbox that answers go to; a new question of an asker replaces its earlier one
first question  waits; with `QUESTIONS_MAX` askers waiting it is turned away, and the asker tries again
further one     while the asker's earlier question waits or is being answered: the same question is ignored as a
                  repetition; a different one replaces the earlier one, and an answer in progress stops
overtaken       a question with a lower number than the one that waits or is being answered: it was sent earlier and
                  arrived late; ignored. An asker numbers its questions upwards
"""

from typing import Literal, NamedTuple

from kv_protocol.recovery import RecoverRequest

QUESTIONS_MAX = 256

QuestionOutcome = Literal["taken", "repeated", "replaced", "overtaken", "turned_away"]


class PendingRecovery(NamedTuple):
    """A recovery request, and the inbox for its answer."""

    asker: str
    request: RecoverRequest


class Questions:
    """The questions about one rank."""

    def __init__(self) -> None:
        self._waiting: dict[str, PendingRecovery] = {}
        self._answered: PendingRecovery | None = None

    def ask(self, question: PendingRecovery) -> QuestionOutcome:
        """Queue a question; return the outcome. `replaced`: it replaced an earlier question of the asker."""
        asker = question.asker
        is_answered = self._answered is not None and self._answered.asker == asker
        present = self._waiting.get(asker) or (self._answered if is_answered else None)
        if question == present:
            return "repeated"
        if present is not None and question.request.request_id < present.request.request_id:
            return "overtaken"
        if present is None and len(self._waiting) >= QUESTIONS_MAX:
            return "turned_away"
        self._waiting[asker] = question
        if is_answered:
            self._answered = None
        return "taken" if present is None else "replaced"

    def next(self) -> PendingRecovery | None:
        """Return the question to answer now; None if none waits."""
        asker = next(iter(self._waiting), None)
        self._answered = None if asker is None else self._waiting.pop(asker)
        return self._answered

    def is_current(self, question: PendingRecovery) -> bool:
        """Return whether the question being answered is still this one."""
        return self._answered is question
