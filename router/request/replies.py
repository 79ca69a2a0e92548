"""Answers that the router and `router pools` make themselves: JSON bodies and their headers."""

from collections.abc import Sequence
from urllib.parse import unquote

import msgspec

from kv_protocol.errors import shortened
from router.request import refusals
from router.request.refusals import Refusal
from router.server.exchange import Exchange

MODELS_PATH = "/v1/models/"


def answer(exchange: Exchange, value: object, status: int = 200) -> None:
    """Answer with `value` as JSON."""
    exchange.answer(status, msgspec.json.encode(value))


def refuse(exchange: Exchange, refusal: Refusal) -> None:
    """Answer with the refusal."""
    exchange.answer(refusal.status, refusal.body, headers=refusal.headers)


def unknown_path(exchange: Exchange) -> Refusal:
    """Return a refusal: there is no such path."""
    return refusals.invalid(f"{exchange.method} {shortened(exchange.path)}: Not Found", status=404)


def answer_models(exchange: Exchange, names: Sequence[str]) -> None:
    """Answer with all models, in the format of `GET /v1/models`."""
    answer(exchange, {"object": "list", "data": [_model(name) for name in names]})


def answer_model(exchange: Exchange, names: Sequence[str]) -> None:
    """Answer with the model that the path names, or refuse if it is unknown."""
    name = unquote(exchange.path.removeprefix(MODELS_PATH))
    if name in names:
        answer(exchange, _model(name))
    else:
        refuse(exchange, refusals.unknown_model(name, tuple(names)))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kv-router"}
