"""Why media of a request are refused: an exception with a reason from a closed list, without secrets.

    field     the path in the request, as its client wrote it
    found     the value found there: of a URL only scheme, host, port and path, of data its type or size
    allowed   the values allowed there
    reason    one of `MediaReason`: a metric's label

A query may have a signature, and the part before an `@` a password: neither is shown.
"""

from typing import Literal

from kv_protocol.openai.requests import RequestInvalid

MediaReason = Literal[
    "text_only",
    "part_form",
    "part_kind",
    "parts_count",
    "placeholder",
    "url_form",
    "url_scheme",
    "url_credentials",
    "url_port",
    "data_form",
    "path_form",
    "path_outside",
    "path_missing",
    "address_unresolved",
    "address_unspecified",
    "address_loopback",
    "address_private",
    "address_cgnat",
    "address_link_local",
    "address_metadata",
    "address_multicast",
    "address_reserved",
    "redirect_count",
    "redirect_form",
    "unreachable",
    "timeout",
    "status",
    "encoding",
    "incomplete",
    "too_large",
    "content_type",
    "content",
    "pixels",
    "embeddings_header",
]
_SHOWN_CHARACTERS_MAX = 120


class MediaRefused(RequestInvalid):
    """Media are refused; `reason` is from the closed list, the message has the field, found and allowed."""

    def __init__(self, reason: MediaReason, field: str, found: object, allowed: str) -> None:
        super().__init__(field, found, allowed)
        self.reason = reason


def shown_url(url: str) -> str:
    """Return the part of `url` that may be logged, at most 120 characters: no query, fragment, credentials or data.

    A text without a scheme is shown from its last `@`; a host is not shown if a `?` or `#` may be in a password.
    """
    scheme, separator, rest = url.partition(":")
    plain = url.partition("?")[0].partition("#")[0]
    head, _, tail = plain.partition("//")
    authority, slash, path = tail.partition("/")
    if separator and "".join(filter(str.isprintable, scheme)).strip().lower() == "data":
        media_type, comma, _ = rest.partition(",")
        plain = f"data:{media_type},..." if comma else "data:..."
    elif "@" in authority or "%40" in authority:
        plain = f"{head}//...@{authority.replace('%40', '@').rpartition('@')[2]}{slash}{path}"
    elif not slash and "@" in url[len(plain) :].replace("%40", "@"):
        plain = f"{head}//..."
    elif "@" in plain and not (authority and head.endswith(":")):  # some URL parsers find credentials there
        plain = f"...@{plain.rpartition('@')[2]}"
    shown = "".join(character if character.isprintable() else "?" for character in plain)
    return shown if len(shown) <= _SHOWN_CHARACTERS_MAX else f"{shown[: _SHOWN_CHARACTERS_MAX - 3]}..."
