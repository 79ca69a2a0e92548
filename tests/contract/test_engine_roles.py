"""What every engine does in each role, whichever it is: the same assertions for all. Planted bugs fail them."""

import asyncio
from typing import Any

import msgspec
import pytest

from kv_protocol.fleet import Role
from tests.contract.engines import BLOCK_SIZE, PROMPT, RunEngine, outputs, request, rows_until, run_engine, tokens_of
from tests.support.engine_description import handoff_of_json
from tests.support.trtllm import trtllm
from tests.unit.worker_agent.media_samples import GIF, PNG
from worker_agent.media.inputs import digest_words
from worker_agent.media.parts import content_digest
from worker_agent.port.handoff import Handoff, handoff_json
from worker_agent.port.sampling import Sampling
from worker_agent.port.types import Engine, EngineOutput, Media, RequestRefused

__all__ = ["run_engine", "trtllm"]

LOGPROBS = 3
STEPS = 6
PICTURES = [
    Media(field="f", media_type=kind, data=data, digest=content_digest(data))
    for kind, data in (("image/png", PNG), ("image/gif", GIF))
]


async def handed_over(prefill: Engine, name: str = "a", **fields: Any) -> tuple[EngineOutput, Handoff]:
    """Return a prefill engine's one answer, and its handoff as the next engine reads it off the wire."""
    answers = await outputs(prefill, request(name, **fields))
    answer = answers[0]
    assert answer.handoff is not None
    assert len(answers) == 1
    return answer, handoff_of_json(handoff_json(answer.handoff))


async def nothing_held(engine: Engine) -> None:
    row = await rows_until(engine, lambda row: row["numActiveRequests"] == 0)
    assert row["kvCacheStats"]["usedNumBlocks"] == 0


# -------------------------------------------------------------------------------------------------- aggregated
async def test_an_aggregated_engine_takes_no_prefill_engine_s_handoff(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        with pytest.raises(RequestRefused, match='disaggregated_params: found "one", allowed none'):
            await outputs(running.engine, request(handoff=Handoff(ctx_request_id=1)))


async def test_log_probabilities_stand_beside_their_tokens_best_first(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        told = await outputs(running.engine, request(sampling=Sampling(logprobs=LOGPROBS)))
        without = await outputs(running.engine, request("b"))
    places = [place for output in told for place in output.logprobs]
    assert [place.chosen.token_id for place in places if place] == tokens_of(told) == tokens_of(without)
    assert [[each.rank for each in place.top] for place in places if place] == [[1, 2, 3]] * 4
    for place in filter(None, places):
        assert sorted((each.logprob for each in place.top), reverse=True) == [each.logprob for each in place.top]
        assert place.chosen.logprob <= 0
    assert [output.logprobs for output in without] == [()] * len(without)


async def test_each_choice_has_its_own_tokens_and_its_own_end(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        told = await outputs(running.engine, request(sampling=Sampling(choices=2, passed={"temperature": 0.5})))
        one = await outputs(running.engine, request("b"))
    first, second = ([each for each in told if each.choice == choice] for choice in (0, 1))
    assert [first[-1].finish_reason, second[-1].finish_reason] == ["length"] * 2
    assert tokens_of(first) == tokens_of(one) != tokens_of(second)
    assert len(tokens_of(second)) == 4


# ----------------------------------------------------------------------------------------------------- prefill
async def test_a_prefill_engine_makes_one_token_and_says_where_its_kv_is(run_engine: RunEngine) -> None:
    async with run_engine() as one, run_engine("prefill") as prefill:
        whole = await outputs(one.engine, request(max_tokens=4))
        answer, handoff = await handed_over(prefill.engine, max_tokens=4, transfer_id=77)
    assert (answer.token_ids, answer.finish_reason) == (tuple(tokens_of(whole)[:1]), "length")
    assert handoff.first_gen_tokens == answer.token_ids
    assert (handoff.ctx_request_id, handoff.disagg_request_id) == (77, 77)
    assert handoff.opaque_state


async def test_handed_over_blocks_are_held_until_they_are_fetched(run_engine: RunEngine) -> None:
    async with run_engine("prefill") as prefill, run_engine("decode") as decode:
        _, handoff = await handed_over(prefill.engine)
        row = await rows_until(prefill.engine, lambda row: row["numActiveRequests"] == 1)
        assert row["kvCacheStats"]["usedNumBlocks"] >= len(PROMPT) / BLOCK_SIZE
        await outputs(decode.engine, request(handoff=handoff))
        await nothing_held(prefill.engine)
        await nothing_held(decode.engine)


async def test_a_stop_token_on_the_prefill_engine_is_the_whole_answer(run_engine: RunEngine) -> None:
    async with run_engine() as one, run_engine("prefill") as prefill:
        (first, *_) = tokens_of(await outputs(one.engine, request()))
        (answer,) = await outputs(prefill.engine, request(stop_token_ids=(first,)))
        assert (answer.token_ids, answer.finish_reason) == ((first,), "stop")
        await nothing_held(prefill.engine)


async def test_what_a_prefill_engine_cannot_take_is_refused_with_its_field(run_engine: RunEngine) -> None:
    async with run_engine("prefill") as prefill:
        allowed = "none, or an encoder's multimodal_embedding_handles"
        with pytest.raises(RequestRefused, match=f'disaggregated_params: found "one", allowed {allowed}'):
            await outputs(prefill.engine, request(handoff=Handoff(first_gen_tokens=(1,), opaque_state=b"x")))
        with pytest.raises(RequestRefused, match="n: found 2, allowed 1 on a prefill worker"):
            await outputs(prefill.engine, request(sampling=Sampling(choices=2, passed={"temperature": 0.5})))


# ------------------------------------------------------------------------------------------------------ decode
@pytest.mark.parametrize("max_tokens", [1, 2, STEPS])
async def test_two_engines_say_what_one_would_have_said(run_engine: RunEngine, max_tokens: int) -> None:
    asked: dict[str, Any] = {"max_tokens": max_tokens, "sampling": Sampling(logprobs=LOGPROBS)}
    async with run_engine() as one, run_engine("prefill") as prefill, run_engine("decode") as decode:
        whole = await outputs(one.engine, request(**asked))
        _, handoff = await handed_over(prefill.engine, **asked)
        told = await outputs(decode.engine, request(**asked, handoff=handoff))
    assert tokens_of(told) == tokens_of(whole)
    assert [place for each in told for place in each.logprobs] == [place for each in whole for place in each.logprobs]
    assert [each.finish_reason for each in told] == [None] * (len(told) - 1) + ["length"]


async def test_a_stop_token_after_the_transfer_ends_the_answer(run_engine: RunEngine) -> None:
    async with run_engine() as one, run_engine("prefill") as prefill, run_engine("decode") as decode:
        free = tokens_of(await outputs(one.engine, request(max_tokens=8)))
        end = next(token for token in free[1:] if token != free[0])
        _, handoff = await handed_over(prefill.engine, max_tokens=8, stop_token_ids=(end,))
        told = await outputs(decode.engine, request(max_tokens=8, stop_token_ids=(end,), handoff=handoff))
    assert tokens_of(told) == free[: free.index(end) + 1]
    assert told[-1].finish_reason == "stop"


async def test_a_decode_engine_requires_what_a_prefill_engine_said_of_this_prompt(run_engine: RunEngine) -> None:
    async with run_engine("prefill") as prefill, run_engine("decode") as decode:
        _, handoff = await handed_over(prefill.engine)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({}, 'disaggregated_params: found "none", allowed .*decode mode requires them'),
            ({"handoff": Handoff(opaque_state=b"x")}, "first_gen_tokens: found null, allowed one token or more"),
            ({"handoff": Handoff(first_gen_tokens=(1,))}, "encoded_opaque_state: found null"),
            ({"handoff": msgspec.structs.replace(handoff, opaque_state=b"x")}, "opaque.state"),
            ({"handoff": handoff, "prompt": PROMPT[:-1]}, "opaque.state"),
            (
                {"handoff": handoff, "is_context_and_generation": True},
                'disaggregated_params: found "one", allowed none',
            ),
        ]
        for fields, refusal in wrong:
            with pytest.raises(RequestRefused, match=refusal):
                await outputs(decode.engine, request(**fields))
        assert len(tokens_of(await outputs(decode.engine, request(handoff=handoff)))) == 4


async def test_transfers_side_by_side_come_to_their_own_requests(run_engine: RunEngine) -> None:
    prompts = [tuple(range(first, first + 10)) for first in (20, 40, 60)]
    async with run_engine() as one, run_engine("prefill") as prefill, run_engine("decode") as decode:
        whole = [tokens_of(await outputs(one.engine, request(str(each), prompt=each))) for each in prompts]
        handoffs = [(await handed_over(prefill.engine, str(each), prompt=each))[1] for each in prompts]
        asked = [request(str(each), prompt=each, handoff=handoffs[at]) for at, each in enumerate(prompts)]
        told = await asyncio.gather(*(outputs(decode.engine, each) for each in reversed(asked)))
        assert [tokens_of(each) for each in reversed(told)] == whole
        await nothing_held(prefill.engine)


async def test_a_decode_request_that_is_given_up_at_once_still_frees_the_prefill_engine(run_engine: RunEngine) -> None:
    async with run_engine("prefill") as prefill, run_engine("decode") as decode:
        _, handoff = await handed_over(prefill.engine)
        waiting = asyncio.ensure_future(outputs(decode.engine, request(max_tokens=150, handoff=handoff)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])  # an engine as fast as it can be may have ended it already
        await nothing_held(prefill.engine)
        await nothing_held(decode.engine)


# ------------------------------------------------------------------------------------------------------ encode
async def test_an_encoder_says_a_handle_and_a_hash_of_each_image_and_nothing_else(run_engine: RunEngine) -> None:
    async with run_engine("encode") as encoder:
        said = await encoder.engine.encode("<image><image>", PICTURES)
        again = await encoder.engine.encode("<image>", PICTURES[1:])
        with pytest.raises(RequestRefused, match=r"role: found \"encode\", allowed .* an encoder generates nothing"):
            await outputs(encoder.engine, request())
    assert said.multimodal_hashes == tuple(digest_words(each.digest) for each in PICTURES)
    assert again.multimodal_hashes == said.multimodal_hashes[1:]
    assert len(said.multimodal_embedding_handles or ()) == 2
    assert handoff_of_json(handoff_json(said)) == said


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
async def test_only_an_encoder_encodes(run_engine: RunEngine, role: Role) -> None:
    async with run_engine(role) as running:
        with pytest.raises(RequestRefused, match=f'role: found "{role}", allowed encode'):
            await running.engine.encode("<image>", PICTURES[:1])
