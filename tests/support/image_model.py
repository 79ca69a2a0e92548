"""A small model that takes images: LLaVA's placeholder, one token, in a chat template of marks."""

import json
from pathlib import Path

from tokenizers import AddedToken

from tests.unit.kv_runtime.model_files import qwen_like, write_model

PLACEHOLDER = "<image>"
_TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def write_image_model(directory: Path) -> tuple[str, int]:
    """Write the model; return its path and its image token."""
    tokenizer = qwen_like()
    tokenizer.add_special_tokens([AddedToken(PLACEHOLDER, normalized=False, special=True)])
    token = tokenizer.token_to_id(PLACEHOLDER)
    assert token is not None
    path = write_model(directory, tokenizer, _TEMPLATE, eos_token="<|endoftext|>")
    (directory / "config.json").write_text(json.dumps({"model_type": "llava_next", "image_token_index": token}))
    return path, token
