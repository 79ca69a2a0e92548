"""Small models like those that are served: byte-level BPE of two kinds, and vocabularies that rank their tokens."""

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kv_runtime.text.chat_messages import TextError

_SAID = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TRAINED_ON = """The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's asleep. 12345 67890
def encode(self, text: str) -> list[int]:\n    return self.tokenizer.encode(text).ids\n
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語の文章です。 <|im_start|>user and assistant
"""
LLAMA_MARKS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
QWEN_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_CALLS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message }}
{%- if tools is not none %}{{- '\\n' + (tools | tojson) }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- (message['content'] or '') | trim }}
    {%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
QWEN_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set asks = message.role == 'user' and not message.content.startswith('<tool_response>') %}
    {%- if asks and ns.last == messages | length - 1 %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def llama_like() -> Tokenizer:
    """Return a model that numbers by three digits, and puts a mark before a prompt."""
    tokenizer = _byte_level(_SAID + r"\p{N}{1,3}" + _REST, models.BPE(ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in LLAMA_MARKS])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    return tokenizer


def qwen_like() -> Tokenizer:
    """Return a model that composes characters first, numbers by one digit, and has marks that are not special."""
    tokenizer = _byte_level(_SAID + r"\p{N}" + _REST, models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in QWEN_MARKS])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in QWEN_CALLS])
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer, template: str, **special_tokens: str) -> str:
    """Write a model's directory and return its path."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, **special_tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def _byte_level(pattern: str, model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([_TRAINED_ON], trainer)
    return tokenizer


def refused(call: Callable[[], object]) -> TextError:
    """Return the error that the call raises."""
    with pytest.raises(TextError) as raised:
        call()
    return raised.value


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
_SPOKEN = "the aaaa abab ABba 'll  \t\n\r\n  = ==== -- 00112233 é ü 中中文 日本 한국어 😀👍🏽 ни он \u0301\u200d"
_POOLS = (
    "ab", " ab", " \t\n\r\u3000\u00a0", "0123456789٣½ⅷ", "中文日本語〇", "".join(map(chr, range(0x20, 0x7F))),
    "".join(map(chr, range(0xA0, 0x600))), "".join(map(chr, range(0x1F300, 0x1FB00))), "'sS\u017ftTrReEvVlLdD \u0301",
)  # fmt: skip


def drawn_tokens(random: Random, count: int = 600) -> list[bytes]:
    """Return tokens by rank: all bytes, then joined tokens, and some that no merges make."""
    tokens = [bytes((byte,)) for byte in range(0x100)]
    said = [token.encode() for token in _SPOKEN]
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
            runs.append(random.choice(specials) if specials else random.choice(_SPOKEN.split()) * 3)
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
