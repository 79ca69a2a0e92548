"""Vocabularies that rank their tokens, drawn at random, and the files of models that have them."""

import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

KIMI_CONFIG: dict[str, Any] = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
}
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SAID = "the aaaa abab ABba 'll  \t\n\r\n  = ==== -- 00112233 é ü 中中文 日本 한국어 😀👍🏽 ни он \u0301\u200d"
_POOLS = (
    "ab", " ab", " \t\n\r\u3000\u00a0", "0123456789٣½ⅷ", "中文日本語〇", "".join(map(chr, range(0x20, 0x7F))),
    "".join(map(chr, range(0xA0, 0x600))), "".join(map(chr, range(0x1F300, 0x1FB00))), "'sS\u017ftTrReEvVlLdD \u0301",
)  # fmt: skip


def drawn_tokens(random: Random, count: int = 600) -> list[bytes]:
    """Return tokens by rank: all bytes, then joined tokens, and some that no merges make."""
    tokens = [bytes((byte,)) for byte in range(0x100)]
    said = [token.encode() for token in _SAID]
    parts = [bytes((byte,)) for token in said for byte in token]
    while len(tokens) < count:
        if random.random() < 0.05:
            made = random.choice(said) + random.choice(said) + random.choice(said)
        else:
            made = random.choice(parts) + random.choice(parts)
        if made not in tokens and len(made) <= 12:
            tokens.append(made)
            parts += [made] * 3
    return tokens


def drawn_text(random: Random, specials: Sequence[str] = ()) -> str:
    """Return a text of runs of many scripts and kinds of space, of any characters, and of special tokens."""
    runs = []
    for _ in range(random.randrange(1, 10)):
        kind = random.randrange(12)
        if kind < len(_POOLS):
            runs.append("".join(random.choices(_POOLS[kind], k=random.randrange(1, 16))))
        elif kind == len(_POOLS):
            any_code = (random.choice((random.randrange(0xD800), random.randrange(0xE000, 0x110000))) for _ in "1234")
            runs.append("".join(map(chr, any_code)))
        else:
            runs.append(random.choice(specials) if specials else random.choice(_SAID.split()) * 3)
    return "".join(runs)


def write_lines(path: Path, tokens: Sequence[bytes]) -> None:
    """Write what tiktoken reads."""
    path.write_bytes(b"".join(b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))


def write_kimi(directory: Path, tokens: Sequence[bytes], named: Sequence[str] = ("[BOS]", "[EOS]"), **more: Any) -> str:
    """Write a model's directory of Kimi's kind, and return its path."""
    write_lines(directory / "tiktoken.model", tokens)
    added = {str(at): {"content": name, "special": name[0] == "["} for at, name in enumerate(named, len(tokens))}
    config = {**KIMI_CONFIG, "added_tokens_decoder": added, **more}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def tekken(tokens: Sequence[bytes], specials: Sequence[str] | None = None, count: int = 30) -> dict[str, Any]:
    """Return a `tekken.json`; its vocabulary has one token more than the model takes."""
    vocab = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate((*tokens, b"left out"))
    ]
    config = {
        "pattern": TEKKEN_PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(tokens) + count,
        "default_num_special_tokens": count,
        "version": "v3" if specials is None else "v11",
    }
    named = [{"rank": at, "token_str": name, "is_control": True} for at, name in enumerate(specials or ())]
    return {"config": config, "vocab": vocab, **({} if specials is None else {"special_tokens": named})}


def write_tekken(directory: Path, file: object) -> str:
    """Write a model's directory of Mistral's kind, and return its path."""
    (directory / "tekken.json").write_text(json.dumps(file))
    return str(directory)
