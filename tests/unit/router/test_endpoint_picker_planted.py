"""Bugs of the endpoint picker that are planted on purpose; the test of each fact finds its own."""

from collections.abc import Callable

import pytest

from router.endpoint_picker import stream
from router.endpoint_picker.messages import ToGateway
from router.endpoint_picker.schema import MESSAGES
from router.endpoint_picker.stream import AnswerOver, AnswerTally, Commands, GatewayStream
from router.endpoint_picker.wire import encode
from tests.support.planting import plant
from tests.unit.router import test_endpoint_picker as facts


class LeavesInSilence(GatewayStream):
    """The router does not hear that the gateway gave the request up: its tokens stay booked."""

    def closed(self) -> Commands:
        super().closed()
        return ()


class CountsOneTooMany(AnswerTally):
    """The first bytes of a stream count as an event behind them."""

    def end(self) -> AnswerOver:
        over = super().end()
        return AnswerOver(over.tail, over.later_events + self.has_begun)


def without_metadata(reply: ToGateway) -> bytes:
    """Return the message with the destination in its header alone; some gateways read the metadata."""
    response = MESSAGES["ProcessingResponse"].FromString(encode(reply))
    response.ClearField("dynamic_metadata")
    return bytes(response.SerializeToString())


@pytest.mark.parametrize(
    ("place", "name", "bug", "finds"),
    [
        (
            facts,
            "GatewayStream",
            LeavesInSilence,
            facts.test_a_gateway_that_gives_up_is_told_to_the_router_until_the_answer_is_complete,
        ),
        (
            stream,
            "AnswerTally",
            CountsOneTooMany,
            facts.test_a_streams_events_are_counted_behind_the_first_bytes_however_they_are_cut,
        ),
        (facts, "encode", without_metadata, facts.test_the_destination_is_in_the_header_and_in_the_metadata),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.planted
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, bug: object, finds: Callable[[], None]
) -> None:
    finds()
    plant(place, name, bug, monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        finds()
