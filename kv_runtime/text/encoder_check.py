"""Compares two encoders on a fixed corpus.

    TEXTS            languages and scripts, code, numbers, white space of every kind, emoji, broken and long text
    added tokens     each alone and twice in a row, among words, spaces and line ends, and cut short by one character
    mixes            sequences of pieces of all these, drawn by a generator with a fixed seed

Each text is encoded with and without the model's special tokens.
"""

from collections.abc import Callable, Iterator

from tokenizers import Tokenizer

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
    """Return the first text that an encoder's `pack` encodes differently from `truth`; empty: none."""
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
