"""Text to token ids: `tokenizers` is the reference; `fastokens` is faster, and is used if it gives the same ids.

    wanted   used
    hf       tokenizers
    auto     fastokens if it passes the self-check; else tokenizers, and `reason` says why
    fast     fastokens; a model that it cannot read, or that fails the self-check, is refused

After a call of `keep_segments` either encoder keeps the ids of a chat's segments. The next turn of the chat then
encodes only its new segments.

The self-check compares the ids of these texts, with and without the model's special tokens around them. A part of the
texts depends on the model's added tokens.

    TEXTS            languages and scripts, code, numbers, white space of every kind, emoji, broken and long text
    added tokens     each alone and twice in a row, among words, spaces and line ends, and cut short by one character
    mixes            sequences of pieces of all these, drawn by a generator with a fixed seed

The self-check also fails if fastokens raises for a text. If it raises for one later, tokenizers encodes that text, and
the failure is counted.

Both libraries are Rust: they panic at input that they do not expect, such as a text at which a regular expression
exceeds its limits. A panic is raised as a `BaseException` that is no `Exception`; `text_error` makes it a `TextError`.

Marks are added tokens before which a text may be cut, because the tokenizer finds them in any context. It first finds
the added tokens that are not normalized: from left to right, and at each place the longest. It encodes the text between
them separately. So a text may be cut before each of them, unless the tokenizer finds an overlapping token instead. A
token is a mark when it

    is not normalized, is not `single_word`, and does not strip the space before it
    neither begins nor ends with white space, which other tokens may strip
    is part of no other token that is not normalized, except as the beginning of that token
    has no proper prefix that is the end of a token that is not normalized (itself included)

and the template, or one of its special tokens, contains it: other marks never occur. The text from one mark to the next
is a segment; each turn of a chat repeats the segments of the turns before it (`Segments`).
Source: tokenizers 0.23, `AddedVocabulary`.
"""

import array
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from threading import Lock
from typing import Any, Literal, NamedTuple

import fastokens  # type: ignore[import-untyped]  # it ships no types
import msgspec
from tokenizers import AddedToken, Tokenizer

from kv_runtime.text.chat_messages import TextError

IDS_MAX = 1 << 24
"""fastokens allocates a table up to the largest id; vocabularies have some 2^18."""
CONFIGURED = "configured"
"""The `reason` of tokenizers if the settings ask for it (`hf`)."""

Wanted = Literal["auto", "hf", "fast"]
_SEGMENT_BYTES = 300
"""Approximate overhead of a kept segment."""


def mark_pattern(added: Iterable[AddedToken], written: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds those marks among the `added` tokens that a text of `written` contains.

    Without such marks it matches nothing.
    """
    found_first = [token for token in added if not token.normalized]
    contents = [token.content for token in found_first]
    marks = [
        token.content
        for token in found_first
        if _is_mark(token, contents) and any(token.content in text for text in written)
    ]
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def _is_mark(token: AddedToken, contents: list[str]) -> bool:
    """Return whether a text may be cut before `token`; `contents` are the texts of the tokens not normalized."""
    content = token.content
    if not content or token.lstrip or token.single_word or content != content.strip():
        return False
    return not any(_takes(other, content) for other in contents)


def _takes(other: str, content: str) -> bool:
    """Return whether `content` may begin within `other`: in a text, `other` then hides the beginning of `content`."""
    ends_as_it_begins = any(other.endswith(content[:length]) for length in range(1, len(content)))
    return ends_as_it_begins or content in other[1:]


class KeptSegments(NamedTuple):
    """How many bytes of text had kept ids so far, and how many had none; the segments kept now, and their memory.

    In `Segments`, a new segment that occurs twice in a text is encoded once, and counted twice in `miss_bytes`.
    """

    hit_bytes: int = 0
    miss_bytes: int = 0
    entries: int = 0
    bytes: int = 0


class Segments:
    """The ids of segments; beyond `bytes_max` the least recently used are dropped. Thread-safe."""

    def __init__(self, marks: re.Pattern[str], bytes_max: int) -> None:
        self._marks, self._bytes_max = marks, bytes_max
        self._ids = OrderedDict[str, bytes]()
        self._lock = Lock()
        self._size_bytes = self._hit_bytes = self._miss_bytes = 0

    def pack(self, text: str, encode: Callable[[list[str]], list[bytes]]) -> bytes:
        """Return the ids of the text; `encode` returns those of segments that are not kept."""
        places = [0, *(match.start() for match in self._marks.finditer(text)), len(text)]
        segments, ids_of = [text[start:end] for start, end in pairwise(places) if start < end], self._ids
        with self._lock:
            found = {each: ids_of[each] for each in segments if each in ids_of}
            for each in found:
                ids_of.move_to_end(each)
        new = [each for each in dict.fromkeys(segments) if each not in found]
        made = dict(zip(new, encode(new), strict=True))
        found |= made
        miss_bytes = sum(len(each.encode()) for each in segments if each in made)
        with self._lock:
            self._miss_bytes += miss_bytes
            self._hit_bytes += (len(text) if text.isascii() else len(text.encode())) - miss_bytes
            for each, ids in made.items():
                if each not in ids_of:  # else another thread encoded it, too
                    ids_of[each] = ids
                    self._size_bytes += _size(each, ids)
            while self._size_bytes > self._bytes_max:
                self._size_bytes -= _size(*ids_of.popitem(last=False))
        return b"".join([found[each] for each in segments])

    def kept(self) -> KeptSegments:
        """Return the figures."""
        return KeptSegments(self._hit_bytes, self._miss_bytes, len(self._ids), self._size_bytes)


def _size(segment: str, ids: bytes) -> int:
    return len(segment) + len(ids) + _SEGMENT_BYTES


def is_panic(error: BaseException) -> bool:
    """Return whether a Rust library panicked. Each library has its own class of this name, and does not export it."""
    return type(error).__name__ == "PanicException"


def text_error(error: BaseException, field: str, allowed: str) -> BaseException:
    """Return the `TextError` of a panic; any other error as it is."""
    return TextError(field, str(error), allowed) if is_panic(error) else error


class Encoder:
    """Encodes texts with `fast` (fastokens); without it, or if it fails, with the reference. Thread-safe.

    tokenizers' batch call releases the GIL; its call for one text does not.
    """

    def __init__(self, tokenizer: Tokenizer, reason: str, fast: Any = None) -> None:  # noqa: ANN401 - it has no types
        self.name = "hf" if fast is None else "fast"
        self._tokenizer, self._fast = tokenizer, fast
        self._segments: Segments | None = None
        self.reason = reason
        """Why this encoder was chosen."""
        self.failures = 0
        """Texts for which the fast encoder failed and the reference was used."""

    def pack(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids as little-endian u32s, optionally with the model's special tokens around them.

        A panic of the reference is raised as it is: the caller makes it a `TextError` that names the text's field.
        """
        if self._fast is not None:
            try:
                return self.pack_fast(text, add_special_tokens=add_special_tokens)
            except BaseException as error:
                if not isinstance(error, Exception) and not is_panic(error):
                    raise
                self.failures += 1
        if self._segments is not None and not add_special_tokens:
            return self._segments.pack(text, self._packed)
        return self._packed([text], add_special_tokens=add_special_tokens)[0]

    def pack_fast(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the ids of fastokens; raise what it raises."""
        ids: bytes = self._fast.encode_batch_flat([text], add_special_tokens=add_special_tokens)[0]
        return ids

    def _packed(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [array.array("I", each.ids).tobytes() for each in encoded]

    def keep_segments(self, marks: re.Pattern[str], bytes_max: int) -> None:
        """Keep the ids of text between `marks`, in at most about `bytes_max` bytes. fastokens finds marks by itself."""
        if self._fast is None:
            self._segments = Segments(marks, bytes_max)
        else:
            self._fast.enable_segment_cache(bytes_max)

    def kept(self) -> KeptSegments:
        """Return the totals and the size of the kept segments."""
        if self._fast is None:
            return KeptSegments() if self._segments is None else self._segments.kept()
        statistics = self._fast.segment_cache_stats() or {}
        return KeptSegments(*[statistics.get(name, 0) for name in KeptSegments._fields])


def choose_encoder(tokenizer: Tokenizer, content: bytes, wanted: Wanted = "auto") -> Encoder:
    """Return the encoder of a model: `content` is its `tokenizer.json`, and `tokenizer` was read from it.

    Raises:
        TextError: fastokens is wanted, but cannot read the tokenizer or fails the self-check.
    """
    if wanted == "hf":
        return Encoder(tokenizer, CONFIGURED)
    failed = "fastokens cannot read the tokenizer"
    try:
        _check_ids(content)
        fast = fastokens.Tokenizer.from_json_str(content.decode())
        fast.no_truncation()
        fast.no_padding()
        candidate = Encoder(tokenizer, "equal in the self-check", fast)
        failed = "the self-check fails"
        why = first_difference(tokenizer, candidate.pack_fast)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        why = f"{failed}: {error}"
    if not why:
        return candidate
    if wanted == "fast":
        raise TextError("tokens.encoder", why, "fast for a model that it encodes as tokenizers does, auto, or hf")
    return Encoder(tokenizer, why)


class _AddedToken(msgspec.Struct, gc=False):
    id: int


class _Ids(msgspec.Struct):
    """The ids of added tokens in a `tokenizer.json`."""

    added_tokens: list[_AddedToken] | None = None


def _check_ids(content: bytes) -> None:
    """Raise `ValueError` for an id so large that the table of fastokens would need too much memory."""
    largest = max((token.id for token in msgspec.json.decode(content, type=_Ids).added_tokens or ()), default=0)
    if largest > IDS_MAX:
        raise ValueError(f"the added token {largest} is beyond {IDS_MAX}")


# ---------------------------------------------------------------------------------------------- the self-check

_MIXES = 64
_PIECES = 24
_SHOWN_CHARACTERS = 60
_CODE = (
    'def f(x: int) -> str:\n    """Doc."""\n\treturn f"{x!r:>10}" if x != 0x1F else None  # comment\n\n\n',
    "for (int i = 0; i <= n; ++i) { a[i] ^= ~b[i] >> 3; }  // done\r\n",
    "SELECT * FROM \"t\" WHERE a <> 'b' AND c LIKE '%_x';\n",
    '{"key": [1, 2.5e-10, null, true, "\\u00e9\\n"], "nested": {"a": {}}}',
    '<html><body class="x">&amp;&nbsp;</body></html>\n',
    "https://example.org/a/b?c=d&e=%20f#g  user.name+tag@example.co.uk  /usr/lib/x86_64-linux-gnu",
    "```python\nprint('hi')\n```\n\n| a | b |\n|---|---|\n* item\n1. one\n",
)
_PROSE = (
    "The quick brown fox jumps over the lazy dog; it's what they'd said, isn't it? We'll see. I'M SURE THEY'RE HERE.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis. L’été «déjà» vu…",  # noqa: RUF001 - typographic on purpose
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "いろはにほへと ちりぬるを。日本語とカタカナ、漢字が混ざった文章です。",
    "我能吞下玻璃而不伤身体。這是繁體中文,包括標點符號!",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का",
    "นายสังฆภัณฑ์ เฮงพิทักษ์ฝั่ง ผู้เฒ่าซึ่งมีอาชีพเป็นฅนขายฃวด",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Türkçe İıĞğŞş. Việt Nam: Tiếng Việt rất đẹp.",
)
_AWKWARD = (
    "",
    " ",
    "  ",
    "\n",
    "\t \n \r\n\r\n   x   \n\n  y\t\tz ",
    " \u00a0\u2003\u3000\u200b\ufeff\u2028\u2029\x85\x0b\x0c|",
    "0 1 12 123 1234 12345 1,234,567.89 3.14159265358979 1e-9 0xDEADBEEF ½ ² ⅷ ٣٤٥ १२३ 二〇",
    "a\u0301e\u0308 \u00e1 \u1e9b\u0323 \ufb01 \uff21\uff22 \u212b \u2126 \uac00\u11a8 o\u0308\u0323 ﷺ ①",
    "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪☃️❤️ 🤷🏿‍♀️",
    "\x00\x01\x1b[31m\x7f\ufffd\ufffe\U0010ffff\U000e0001\ue000",
    "!!!???...---___===***///\\\\\\(((([[[{{{<<<>>>}}}]]]))))~~``^^%%$$##@@&&||;;::,,''\"\"",
    "'s 't 're 've 'm 'll 'd 'S 'T 'RE ’s n't 'x '' 'ſ",  # noqa: RUF001 - the same
    "camelCaseXMLHttpRequest snake_case kebab-case SCREAMING_CASE x1y2z3 iPhone15 ǅ ß ŉ",
    "<|endoftext|> <|im_start|> <s> </s> [INST] <|x <|> |> <||> <think </tool_call",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ab" * 300,
    " " * 400 + "x" + "\n" * 200 + "\t" * 100,
    "=" * 257 + "1" * 257 + "é" * 257 + "中" * 257,
)
TEXTS = (*_CODE, *_PROSE, *_AWKWARD, "\n".join((*_PROSE, *_CODE)) * 4)


def first_difference(truth: Tokenizer, pack: Callable[..., bytes]) -> str:
    """Return a sentence about the first text that `pack` encodes differently from `truth`; empty: there is none."""
    for text in check_texts([token.content for token in truth.get_added_tokens_decoder().values()]):
        for specials in (False, True):
            expected = truth.encode(text, add_special_tokens=specials).ids
            if pack(text, add_special_tokens=specials) != b"".join(i.to_bytes(4, "little") for i in expected):
                return f"it encodes {text[:_SHOWN_CHARACTERS]!r} otherwise than tokenizers"
    return ""


def check_texts(added: list[str]) -> Iterator[str]:
    """Yield all texts of the self-check for a model with these added tokens."""
    yield from TEXTS
    for token in added:
        yield f"{token}a {token} b{token}{token}\n{token}\n c\t{token}!{token[:-1]}{token[1:]}{token}"
    pieces = [piece for text in (*_CODE, *_PROSE, *_AWKWARD) for piece in (text[:40], text[-9:])] + added
    state = 1
    for _ in range(_MIXES):
        mix = []
        for _ in range(_PIECES):
            state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFF_FFFF_FFFF_FFFF
            mix.append(pieces[(state >> 33) % len(pieces)])
        yield "".join(mix)
