"""Tokens that a request names: stop tokens, biases, banned tokens.

    field of the request           the engine gets
    stop_token_ids                 these and the model's end tokens; with `ignore_eos` only these
    logit_bias {"id": -100..100}   pairs of token and bias; at most 1,024
    bad_words ["a", ..]            the token of each word, at a text's begin and after a space; at most 128. A word of
                                   several tokens is refused: its tokens may not be banned one by one

Source: the OpenAI interface (`logit_bias`); vLLM's for `bad_words` and `stop_token_ids`.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, TypeVar

from kv_protocol.openai.errors import Verbatim
from kv_protocol.openai.requests import Request, RequestInvalid

STOP_TOKENS_MAX = 128
BIASES_MAX = 1024
BAD_WORDS_MAX = 128
_Item = TypeVar("_Item")


class Vocabulary(Protocol):
    """A model's tokens."""

    vocab_size: int
    eos_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the text's tokens."""


def stop_token_ids_of(request: Request, end_ids: Collection[int]) -> tuple[int, ...]:
    """Return the stop tokens, the client's own first; raise `RequestInvalid`."""
    own = _bounded(request.stop_token_ids, "stop_token_ids", STOP_TOKENS_MAX)
    return tuple(dict.fromkeys((*own, *(() if request.ignore_eos else sorted(end_ids)))))


def logit_bias_of(request: Request, vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    """Return tokens and their biases; raise `RequestInvalid`, which names the token."""
    biases = request.logit_bias or {}
    if len(biases) > BIASES_MAX:
        raise RequestInvalid("logit_bias", f"{len(biases)} tokens", f"at most {BIASES_MAX}")
    return tuple((_token(key, vocabulary.vocab_size), bias) for key, bias in biases.items())


def bad_token_ids_of(request: Request, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the banned tokens; raise `RequestInvalid`, which names the word."""
    words = _bounded(request.bad_words, "bad_words", BAD_WORDS_MAX)
    return tuple(dict.fromkeys(token for at, word in enumerate(words) for token in _tokens_of(at, word, vocabulary)))


def _bounded(items: Sequence[_Item] | None, field: str, items_max: int) -> Sequence[_Item]:
    if items is not None and len(items) > items_max:
        raise RequestInvalid(field, Verbatim(f"{len(items)} items"), f"at most {items_max}")
    return items or ()


def _token(key: str, vocab_size: int) -> int:
    if int(key) >= vocab_size:
        raise RequestInvalid("logit_bias", key, f"tokens 0..{vocab_size - 1}")
    return int(key)


def _tokens_of(at: int, word: str, vocabulary: Vocabulary) -> Iterator[int]:
    encoded = [vocabulary.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}")]
    single = [ids[0] for ids in encoded if len(ids) == 1]
    if not single:
        raise RequestInvalid(f"bad_words[{at}]", word[:16], f"a word of one token: it has {len(encoded[0])}")
    yield from single
