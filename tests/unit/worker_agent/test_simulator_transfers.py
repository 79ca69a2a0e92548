"""KV between simulated engines, in virtual time."""

from typing import Any

import msgspec
import pytest

from tests.unit.properties.transfer_fleet import ENGINE, Fleet
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.transfer import TransferRules, state_of
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import EngineRequest, RequestRefused

RULES = TransferRules(token_bytes=1000, bandwidth_bytes_s=1e6, latency_s=0.5, timeout_s=10.0)
"""A token a millisecond, after half a second."""


def request(name: str = "a", isl: int = 10, max_tokens: int = 4, first: int = 0, **fields: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tuple(range(first, first + isl)), max_tokens=max_tokens, **fields)


def test_a_duration_is_latency_and_bytes_over_bandwidth() -> None:
    assert RULES.duration_s(100) == pytest.approx(0.6)


def test_what_the_decode_engine_has_cached_is_not_fetched_again() -> None:
    fleet = Fleet(RULES)
    for name in "ab":
        fleet.ask(request(name))
        fleet.run()
    told = fleet.engines["decode-0"].transfer_statistics()
    assert told.fetched_bytes_total == (10 + 2) * 1000
    assert [output.cached_tokens for output in fleet.answers["b"].decode] == [8] * len(fleet.answers["b"].decode)


# ---------------------------------------------------------------------------------------------------- failures
def test_an_unfetched_context_expires_after_the_timeout_and_is_counted() -> None:
    fleet = Fleet(RULES)
    fleet.ask(request(), decode=None)
    fleet.run(until_s=9.99)
    assert fleet.used_blocks()["prefill-0"] == 3
    fleet.run()
    assert fleet.now_s == pytest.approx(10.0, abs=0.01)
    told = fleet.engines["prefill-0"].transfer_statistics()
    assert (told.held, told.expired_total, told.handed_over_total) == (0, 1, 0)
    assert fleet.used_blocks()["prefill-0"] == 0


def test_a_context_that_was_given_up_or_fetched_is_gone() -> None:
    fleet = Fleet(RULES, decode=2)
    fleet.ask(request(), decode=None)
    fleet.run(until_s=1.0)
    handoff = fleet.answers["a"].prefill[0].handoff
    for name in ("decode-0", "decode-1"):
        fleet.submit(name, request(name, handoff=handoff), lambda _: None)
        fleet.run(until_s=fleet.now_s + 1)
    outcomes = [fleet.engines[name].transfer_statistics().fetches_total for name in ("decode-0", "decode-1")]
    assert [(each["done"], each["gone"]) for each in outcomes] == [(1, 0), (0, 1)]


# ---------------------------------------------------------------------------------------------------- handoffs
def test_a_handoff_names_the_context_its_place_and_its_rank() -> None:
    engine = msgspec.structs.replace(ENGINE, dp_ranks=(0, 1))
    simulator = Simulator(engine, role="prefill", transfers=RULES)
    simulator.contexts.endpoint = "http://127.0.0.1:1"
    for name, transfer_id in (("a", None), ("b", 77), ("c", 77)):
        simulator.submit(request(name, dp_rank=1, transfer_id=transfer_id), 0.0)
    told = [output.handoff for _, output in simulator.step(0.0).outputs]
    names = [(each.ctx_request_id, each.disagg_request_id) for each in told if each]
    assert names == [(1, None), (77, 77), (2, 77)]
    assert {(each.ctx_dp_rank, each.ctx_info_endpoint) for each in told if each} == {(1, "http://127.0.0.1:1")}
    assert [each.opaque_state for each in told if each] == [state_of(request().prompt, name) for name in (1, 77, 2)]
    assert simulator.transfer_statistics().held_tokens == 30


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"first_gen_tokens": (1, 2)}, "first_gen_tokens: found [1, 2], allowed one token"),
        ({"ctx_request_id": None}, "ctx_request_id: found null"),
        ({"ctx_request_id": 6}, 'encoded_opaque_state: found "another"'),
        ({"ctx_info_endpoint": None}, "ctx_info_endpoint: found null"),
    ],
)
def test_a_handoff_that_does_not_say_all_is_refused(changes: dict[str, Any], refusal: str) -> None:
    whole = Handoff(
        first_gen_tokens=(1,),
        ctx_request_id=5,
        opaque_state=state_of(request().prompt, 5),
        ctx_info_endpoint="prefill-0",
    )
    simulator = Simulator(ENGINE, role="decode")
    handoff = msgspec.structs.replace(whole, **changes)
    with pytest.raises(RequestRefused) as caught:
        simulator.submit(request(handoff=handoff), 0.0)
    assert f"disaggregated_params.{refusal}" in str(caught.value)
    simulator.submit(request(handoff=whole), 0.0)
