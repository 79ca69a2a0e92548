"""Readers that ask about one rank: one is answered at a time, each once.

an asker        the inbox that answers go to; whoever asks again has given up what it asked before
asks            waits its turn; beyond `QUESTIONS_MAX` waiting askers it is turned away, and asks again
asks again      while it waits, or is being answered: the same question is a repetition, and nothing; another one
                  takes the place of the first, whose answer ends where it is
is overtaken    a question with a lower number than the one that waits, or is being answered: it was sent before that
                  one and came late; nothing. An asker numbers its questions upwards
"""

from typing import Literal, NamedTuple

from kv_protocol.recovery import RecoverRequest

QUESTIONS_MAX = 256

QuestionOutcome = Literal["taken", "repeated", "replaced", "overtaken", "turned_away"]


class Question(NamedTuple):
    """A request, and the inbox that its answer goes to."""

    asker: str
    request: RecoverRequest


class Questions:
    """The questions about one rank."""

    def __init__(self) -> None:
        self._waiting: dict[str, Question] = {}
        self._answered: Question | None = None

    def ask(self, question: Question) -> QuestionOutcome:
        """Take a question in; return what became of it: `replaced` says that it took the place of an earlier one."""
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

    def next(self) -> Question | None:
        """Return the question to answer now; None where nobody waits."""
        asker = next(iter(self._waiting), None)
        self._answered = None if asker is None else self._waiting.pop(asker)
        return self._answered

    def is_current(self, question: Question) -> bool:
        """Return whether the question being answered is still this one."""
        return self._answered is question
