"""Where a prompt is computed, which phase is asked first, and by which policy the worker of a phase is chosen."""

from typing import Any

import pytest

from kv_protocol.decided import RequestPhase
from kv_protocol.openai.requests import RequestInvalid
from kv_protocol.splitmix import splitmix64
from router.decision.disaggregation import AT_DECODE, PlacementReason, placement, requested_phase
from router.decision.plan import first_phase
from router.decision.policy import PhaseOverrides, Policy
from router.decision.policy_config import ConditionalPolicy, DisaggregationSection
from tests.support.decide import decide
from tests.unit.router.samples import rank, registered, route, row, view

ISL = 4096
BATCHED = 8192


def placed(
    limits: DisaggregationSection, *, held: int = 0, queued: int = 0, active: int = 0, isl: int = ISL
) -> PlacementReason:
    """Return where a prompt is computed, of which the decode worker holds so many blocks."""
    prefill = row("p/0", role="prefill", prefill_tokens_queued=queued)
    decode = row("d/0", role="decode", overlap_blocks=(held,) * 4, active_blocks=active)
    moment = view(prefill, decode)
    moment = moment._replace(
        registrations=(moment.registrations[0], registered("d", role="decode", total_kv_blocks=100))
    )
    return placement(decide(moment, route(isl, phase="alone"), Policy(), splitmix64(1)), limits)


def limits(policy: ConditionalPolicy, **changed: Any) -> DisaggregationSection:
    return DisaggregationSection(conditional=policy, **changed)


@pytest.mark.parametrize(
    ("held", "is_local"),
    [(0, False), (77, False), (78, False), (128, False), (129, True), (255, True)],
)
def test_isl_bounding_wants_few_tokens_and_a_small_share_to_be_new(held: int, is_local: bool) -> None:
    found = placed(limits("isl_bounding"), held=held)
    assert (found in AT_DECODE, found) == (is_local, "short" if is_local else "long")


def test_a_short_prompt_of_which_nothing_is_held_is_not_short_by_its_share() -> None:
    assert placed(limits("isl_bounding"), isl=100) == "long"
    assert placed(limits("isl_bounding"), isl=100, held=2) == "short"


def test_a_prompt_that_was_not_encoded_is_not_short() -> None:
    assert placed(limits("isl_bounding"), isl=0) == "long"


@pytest.mark.parametrize(("queued", "is_local"), [(0, False), (BATCHED // 2, False), (BATCHED // 2 + 1, True)])
def test_prefill_load_computes_at_the_decode_worker_when_prefill_is_busy(queued: int, is_local: bool) -> None:
    found = placed(limits("prefill_load", prefill_busy=0.5), queued=queued, held=255)
    assert (found in AT_DECODE) is is_local


@pytest.mark.parametrize(
    ("held", "queued", "reason"), [(0, 0, "long"), (200, 0, "short"), (0, BATCHED, "prefill_busy")]
)
def test_isl_or_load_wants_either(held: int, queued: int, reason: str) -> None:
    assert placed(limits("isl_or_load", prefill_busy=0.5), held=held, queued=queued) == reason


@pytest.mark.parametrize("policy", ["isl_bounding", "prefill_load", "isl_or_load"])
def test_a_busy_decode_worker_computes_no_prompts(policy: ConditionalPolicy) -> None:
    bounds = limits(policy, prefill_busy=0.0, decode_busy=0.5)
    assert placed(bounds, held=255, queued=1, active=50) in AT_DECODE
    assert placed(bounds, held=255, queued=1, active=51) == "decode_busy"


@pytest.mark.parametrize(
    ("roles", "may_split", "phase"),
    [
        ("aggregated", True, "whole"),
        ("aggregated prefill decode", True, "prefill"),
        ("aggregated prefill decode", False, "whole"),
        ("prefill decode", False, "alone"),
        ("decode", True, "alone"),
        ("prefill", True, "whole"),
        ("aggregated decode", True, "whole"),
        ("", True, "whole"),
    ],
)
def test_what_is_asked_first_follows_from_the_roles_that_are_fit(roles: str, may_split: bool, phase: str) -> None:
    assert first_phase(frozenset(roles.split()), may_split=may_split) == phase


def test_a_phase_that_is_asked_for_is_read_from_its_params() -> None:
    assert requested_phase(b'{"request_type":"context_only","more":1}', accepted=True) == "prefill"
    assert requested_phase(b'{"request_type":"generation_only"}', accepted=True) == "decode"
    assert requested_phase(b'{"request_type":"context_and_generation"}', accepted=True) == "alone"
    for params in (b"{}", b'{"request_type":"all"}', b"[]", b"1"):
        with pytest.raises(RequestInvalid, match=r"disaggregated_params"):
            requested_phase(params, accepted=True)
    with pytest.raises(RequestInvalid, match=r"accept_params"):
        requested_phase(b'{"request_type":"context_only"}', accepted=False)


# ---------------------------------------------------------------- policies of the phases

PREFILL = [row("p0/0", role="prefill", overlap_blocks=(2, 2, 2, 2), active_blocks=90), row("p1/0", role="prefill")]
DECODE = [row("d0/0", role="decode", overlap_blocks=(2, 2, 2, 2), active_blocks=3), row("d1/0", role="decode")]


def winner(phase: RequestPhase, policy: Policy, seed: int = 1) -> str:
    return decide(view(*PREFILL, *DECODE), route(phase=phase), policy, seed).winner.worker_id


def test_a_prefill_rank_is_chosen_by_overlap_and_a_decode_rank_by_load() -> None:
    assert winner("prefill", Policy()) == "p0"
    assert winner("decode", Policy()) == "d1"
    assert winner("alone", Policy()) == "d0"


def test_phases_have_policies_of_their_own() -> None:
    without_credit = Policy(prefill=PhaseOverrides(overlap_credit=0.0))
    assert {winner("prefill", without_credit, seed) for seed in range(20)} == {"p0", "p1"}
    assert Policy(prefill=PhaseOverrides(mode="round-robin")).of("prefill").mode == "round-robin"
    assert Policy(mode="random").of("decode").mode == "random"


def test_a_decode_worker_is_promised_blocks_and_nothing_to_compute() -> None:
    promises: tuple[tuple[RequestPhase, int], ...] = (("decode", 0), ("prefill", 40), ("alone", 40))
    for phase, uncached in promises:
        rows = PREFILL[1:] if phase == "prefill" else DECODE[1:]
        promised = decide(view(*rows), route(phase=phase), Policy(), 1).promise
        assert (promised.uncached_tokens, len(promised.blocks) // 8, promised.extra_blocks) == (uncached, 2, 1)


def test_kv_is_fetched_within_a_domain_alone() -> None:
    moment = view(*DECODE)
    told = (registered("d0", role="decode", transfer_domain="a"), registered("d1", role="decode", transfer_domain="b"))
    found = decide(moment._replace(registrations=told), route(phase="decode", transfer_domain="a"), Policy(), 1)
    assert found.winner == rank("d0/0")
    assert found.exclusions[1] == "transfer_domain 'b': the prompt's KV lies in 'a'"
