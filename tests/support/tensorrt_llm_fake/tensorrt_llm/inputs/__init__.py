"""The forms in which a prompt is given. Source: `tensorrt_llm/inputs/data.py` (`SURFACE.md`).

`multi_modal_embeddings`, which `llmapi/llm.py` reads, stands in neither class there.
"""

from typing import Any, TypedDict


class TextPrompt(TypedDict, total=False):
    """A text, with media for its placeholders."""

    prompt: str
    multi_modal_data: dict[str, Any]
    multi_modal_uuids: dict[str, list[Any]]
    mm_processor_kwargs: dict[str, Any]
    query: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, with media."""

    prompt_token_ids: list[int]
    multi_modal_data: dict[str, Any]
    multi_modal_uuids: dict[str, list[Any]]
    mm_processor_kwargs: dict[str, Any]
    query_token_ids: list[int]


PromptInputs = str | list[int] | TextPrompt | TokensPrompt


def prompt_inputs(inputs: PromptInputs) -> dict[str, Any]:
    """Return the prompt as a map with `prompt` or `prompt_token_ids`.

    Raises:
        TypeError: it is of no known form.
    """
    if isinstance(inputs, str):
        return {"prompt": inputs}
    if isinstance(inputs, list) and all(isinstance(token, int) for token in inputs):
        return {"prompt_token_ids": inputs}
    if isinstance(inputs, dict):
        return dict(inputs)
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
