"""Contexts that a simulated prefill engine holds, and requests that a decode engine takes."""

from typing import Any

import msgspec
import pytest

from tests.support.engine_description import described
from worker_agent.engines.simulated.handovers import TransferRules, state_of
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import EngineOutput, EngineRequest, RequestRefused

ENGINE = described(block_size=4, total_kv_blocks=32, max_num_seqs=8, max_num_batched_tokens=64, max_seq_len=120)
RULES = TransferRules(token_bytes=1000, bandwidth_bytes_s=1e6, latency_s=0.5, timeout_s=10.0)
"""A token a millisecond, after half a second."""


def request(name: str = "a", isl: int = 10, max_tokens: int = 4, first: int = 0, **fields: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tuple(range(first, first + isl)), max_tokens=max_tokens, **fields)


def prefilled(**fields: Any) -> tuple[Simulator, Handoff]:
    """Return a prefill engine that holds one context since 0 s, and its handoff."""
    simulator = Simulator(ENGINE, role="prefill", transfers=RULES)
    simulator.contexts.endpoint = "http://127.0.0.1:1"
    simulator.submit(request(**fields), 0.0)
    ((_, output),) = simulator.step(0.0).outputs
    assert output.handoff is not None
    return simulator, output.handoff


def decoded(simulator: Simulator, asked: EngineRequest) -> list[EngineOutput]:
    simulator.submit(asked, 0.0)
    told = []
    while simulator.has_work:
        told += [output for _, output in simulator.step(0.0).outputs]
    return told


def test_a_duration_is_latency_and_bytes_over_bandwidth() -> None:
    assert RULES.duration_s(100) == pytest.approx(0.6)


# ----------------------------------------------------------------------------------------------------- contexts
def test_a_context_is_held_until_it_is_fetched_with_its_state() -> None:
    simulator, handoff = prefilled(transfer_id=5)
    assert simulator.pool().used_blocks == 3
    for name, state in ((6, handoff.opaque_state), (5, b"another")):
        assert not simulator.hand_over(name, state or b"")
    assert simulator.hand_over(5, handoff.opaque_state or b"")
    assert not simulator.hand_over(5, handoff.opaque_state or b"")
    assert (simulator.pool().used_blocks, simulator.pool().cached_blocks) == (0, 3)
    assert simulator.contexts.handed_over_total == 1


def test_an_unfetched_context_expires_after_the_timeout_and_is_counted() -> None:
    simulator, handoff = prefilled(transfer_id=5)
    simulator.expire(9.99)
    assert (len(simulator.contexts), simulator.contexts.next_expiry_s) == (1, 10.0)
    simulator.expire(10.0)
    assert (len(simulator.contexts), simulator.contexts.expired_total) == (0, 1)
    assert simulator.pool().used_blocks == 0
    assert not simulator.hand_over(5, handoff.opaque_state or b"")


# ------------------------------------------------------------------------------------------------------ decoding
def test_what_the_decode_engine_has_cached_is_not_fetched_again() -> None:
    _, handoff = prefilled()
    simulator, asked = Simulator(ENGINE, role="decode"), request(handoff=handoff)
    assert simulator.uncached_tokens(asked) == 10
    first = decoded(simulator, asked)
    assert simulator.uncached_tokens(asked) == 2
    second = decoded(simulator, request("b", handoff=handoff))
    assert ({each.cached_tokens for each in first}, {each.cached_tokens for each in second}) == ({0}, {8})
    assert simulator.pool().used_blocks == 0


def test_requests_whose_kv_has_come_and_others_begin_in_the_order_of_arrival() -> None:
    _, handoff = prefilled()
    simulator = Simulator(msgspec.structs.replace(ENGINE, max_num_seqs=1), role="decode")
    for asked in (
        request("a", is_context_and_generation=True),
        request("b", handoff=handoff),
        request("c", handoff=handoff),
    ):
        simulator.submit(asked, 0.0)
    simulator.cancel("b")
    ended = []
    while simulator.has_work:
        ended += [name for name, output in simulator.step(0.0).outputs if output.finish_reason]
    assert (ended, simulator.has_requests) == (["a", "c"], False)


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
    assert simulator.contexts.tokens == 30


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"first_gen_tokens": (1, 2)}, "first_gen_tokens: found [1, 2], allowed one token"),
        ({"ctx_request_id": None}, "ctx_request_id: found null"),
        ({"ctx_request_id": 6}, 'encoded_opaque_state: found "another"'),
        ({"ctx_info_endpoint": None}, "ctx_info_endpoint: found null"),
        *(
            ({"ctx_info_endpoint": each}, "ctx_info_endpoint: found ")
            for each in (
                "http://localhost:1", "http://10.0.0.1:1", "https://127.0.0.1:1", "http://127.0.0.1:1/elsewhere",
                "http://user@127.0.0.1:1", "http://127.0.0.1:1?to=1", "tcp://127.0.0.1:1", "",
            )
        ),
    ],
)  # fmt: skip
def test_a_handoff_that_lacks_something_or_names_another_machine_is_refused(
    changes: dict[str, Any], refusal: str
) -> None:
    whole = Handoff(
        first_gen_tokens=(1,),
        ctx_request_id=5,
        opaque_state=state_of(request().prompt, 5),
        ctx_info_endpoint="http://127.0.0.1:1",
    )
    simulator = Simulator(ENGINE, role="decode")
    handoff = msgspec.structs.replace(whole, **changes)
    with pytest.raises(RequestRefused) as caught:
        simulator.submit(request(handoff=handoff), 0.0)
    assert f"disaggregated_params.{refusal}" in str(caught.value)
    simulator.submit(request(handoff=whole), 0.0)
