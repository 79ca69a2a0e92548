"""What a model prefers to the engine's defaults: it counts for arguments that nothing has set, at any depth.

Source: `tensorrt_llm/llmapi/llm_utils.py`, `apply_model_defaults_to_llm_args`; the real one does it where the model is
loaded, in the worker's process, so that `LLM.args` does not show it.
"""

from typing import Any

Json = dict[str, Any]


def with_model_defaults(args: Any, defaults: Json) -> Any:
    """Return the arguments with a model's defaults where they are unset; `args` stays as it is."""
    if not defaults:
        return args
    if "cache_transceiver_config" in defaults:
        raise ValueError("Model defaults must not contain 'cache_transceiver_config'")
    return type(args)(**_merged(_merged(args.model_dump(), defaults), args.model_dump(exclude_unset=True)))


def _merged(lower: Json, upper: Json) -> Json:
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
