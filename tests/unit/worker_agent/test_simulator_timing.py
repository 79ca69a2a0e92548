from statistics import median

import pytest

from bench.fidelity.timings import H200_4B, H200_8B_MIXED, LatencyRow, fit, load_capture
from tests.support.paths import CAPTURES
from worker_agent.engines.simulated.timing import H200_8B, IterationWork

CAPTURE = CAPTURES / "h200_calibration.json"


def context(past: int, new: int) -> IterationWork:
    return IterationWork(context_tokens=new, attention_pairs=new * (past + new / 2))


def test_a_small_prompt_and_a_short_chunk_take_the_floor_and_decoding_the_weights() -> None:
    assert {H200_8B.iteration_s(context(*small)) for small in ((0, 1), (0, 256), (64, 64))} == {H200_8B.context_floor_s}
    assert {H200_8B.iteration_s(IterationWork(decode_sequences=few)) for few in (1, 60)} == {H200_8B.base_s}


def test_cutting_a_prompt_into_long_chunks_costs_nothing() -> None:
    whole_s = H200_8B.iteration_s(context(0, 16_384))
    halves_s = H200_8B.iteration_s(context(0, 8192)) + H200_8B.iteration_s(context(8192, 8192))
    assert halves_s == pytest.approx(whole_s)


def test_a_request_is_on_its_way_for_the_longer_the_longer_its_prompt() -> None:
    assert H200_8B.request_s(1000) - H200_8B.request_s(0) == pytest.approx(1000 * H200_8B.prompt_token_s)


def test_decoding_beside_a_long_context_costs_its_memory_traffic_and_its_tokens() -> None:
    alone_s = H200_8B.iteration_s(context(0, 8192))
    work = IterationWork(context_tokens=8192, attention_pairs=8192**2 / 2, decode_sequences=32, kv_tokens=32_768)
    assert H200_8B.iteration_s(work) == pytest.approx(alone_s + 32_768 * H200_8B.kv_token_s + 32 * H200_8B.token_s)


@pytest.mark.skipif(not CAPTURE.exists(), reason=f"no {CAPTURE}")
def test_the_model_meets_the_measured_latencies() -> None:
    rows = load_capture(CAPTURE).rows
    ttft = [abs(row.relative_error(H200_8B)) for row in rows if row.kind == "ttft"]
    itl = [abs(row.relative_error(H200_8B)) for row in rows if row.kind == "itl"]
    assert (median(ttft) <= 0.029, max(ttft) <= 0.165) == (True, True)
    assert (median(itl) <= 0.014, max(itl) <= 0.065) == (True, True)


def test_the_fit_finds_the_constants_of_noiseless_rows() -> None:
    shapes = [
        LatencyRow("ttft", isl, 1.0, cached=isl * part // 4)
        for isl in (64, 256, 2048, 8192, 32_768)
        for part in range(4)
    ]
    shapes += [LatencyRow("itl", 1024, 1.0, batch=batch) for batch in (1, 8, 32, 64, 128, 256)]
    rows = [LatencyRow(r.kind, r.isl, r.modelled_ms(H200_8B), r.cached, r.batch) for r in shapes]
    found = fit(rows)
    assert max(abs(row.relative_error(found)) for row in rows) < 0.01


def test_a_sequence_that_decodes_beside_a_context_costs_more_than_beside_others() -> None:
    mixed = IterationWork(context_tokens=512, attention_pairs=512 * 256, decode_sequences=10, kv_tokens=10_000)
    decoding = IterationWork(decode_sequences=10, kv_tokens=10_000)
    beside_s = H200_8B_MIXED.iteration_s(mixed) - H200_8B.iteration_s(mixed)
    assert beside_s == pytest.approx(10 * H200_8B_MIXED.mixed_sequence_s)
    assert H200_8B_MIXED.iteration_s(decoding) == H200_8B.iteration_s(decoding)


def test_neighbours_stretch_what_the_gpu_computes_and_not_the_launching_of_kernels() -> None:
    decoding, launched = IterationWork(decode_sequences=1), context(0, 1)
    assert H200_4B.iteration_s(decoding, 3) == pytest.approx((1 + 3 * H200_4B.neighbour_ratio) * H200_4B.base_s)
    waited_s = H200_4B.iteration_s(launched, 3) - H200_4B.iteration_s(launched)
    assert waited_s == pytest.approx(3 * H200_4B.neighbour_ratio * H200_4B.base_s, rel=1e-3)
