"""What a setting may be, in this project's words instead of pydantic's."""

from typing import Any

_ALLOWED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "extra_forbidden": "no such key",
    "dict_type": "a mapping",
    "finite_number": "a number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_long": "{max_length} characters or fewer",
    "string_too_short": "{min_length} characters or more",
    "string_type": "text",
    "too_long": "{max_length} items or fewer",
    "too_short": "{min_length} items or more",
    "tuple_type": "a list",
}


def allowed(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails, which it does not export
    """Return what the setting allows; for an error of our own checks, its message."""
    kind: str = error["type"]
    if kind == "missing":
        return "missing"
    if kind in _ALLOWED:
        bounds = {
            name: f"{each:.12g}" if isinstance(each, float) else each for name, each in error.get("ctx", {}).items()
        }
        return f"allowed {_ALLOWED[kind].format(**bounds)}"
    return str(error["msg"]).removeprefix("Value error, ")
