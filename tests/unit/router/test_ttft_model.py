"""What the models of latency say before, while and after they learn, and when tokens came."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.decode_time import DECODE_HEADER, decode_header
from kv_protocol.ids import WorkerRank
from kv_protocol.splitmix import choice_index, unit_interval
from router.native import built
from tests.reference.forecasts import FEATURE_MAX, SECONDS_MAX, TTFT, VARIANCE_MAX, VARIANCE_MIN, LatencyModel


@pytest.mark.parametrize(
    ("first_s", "later_tokens", "decode_s", "is_streamed", "found"),
    [
        (1.0, 4, None, True, (1.0, 0.5)),
        (1.0, 0, None, True, (1.0, None)),
        (3.0, 4, None, True, (3.0, None)),
        (None, 4, None, True, (None, None)),
        (2.9, 4, None, False, (None, None)),
        (2.9, 4, 1.0, False, (2.0, 0.25)),
        (None, 0, 0.0, False, (3.0, None)),
        (None, 4, 3.1, False, (None, None)),
    ],
)
def test_what_is_known_of_an_answer_of_three_seconds(
    first_s: float | None,
    later_tokens: int,
    decode_s: float | None,
    is_streamed: bool,
    found: tuple[float | None, float | None],
) -> None:
    assert built.latency_of(first_s, 3.0, later_tokens, decode_s, is_streamed=is_streamed) == found


@given(
    st.just(0.0) | st.floats(1e-6, 600),
    st.integers(0, 1000),
    st.none() | st.just(0.0) | st.floats(1e-6, 700),
    st.booleans(),
)
def test_no_time_between_tokens_is_0_or_longer_than_the_answer(
    duration_s: float, later_tokens: int, decode_s: float | None, is_streamed: bool
) -> None:
    ttft_s, itl_s = built.latency_of(duration_s / 2, duration_s, later_tokens, decode_s, is_streamed=is_streamed)
    assert itl_s is None or 0 < itl_s * later_tokens <= duration_s * (1 + 1e-9)
    assert ttft_s is None or 0 <= ttft_s <= duration_s


def stated_s(said: bytes, *, is_streamed: bool = False) -> float | None:
    """Return the decode time of an answer with this header."""
    return built.answer_of(b"", {DECODE_HEADER.encode(): said}, is_streamed, has_begun=False).decode_s


def test_a_stream_states_no_decode_time() -> None:
    assert (stated_s(b"812.4"), stated_s(b"812.4", is_streamed=True)) == (0.8124, None)


@given(st.floats(0, 10_000))
def test_what_an_agent_states_is_read_to_the_microsecond(seconds: float) -> None:
    assert stated_s(decode_header(seconds).encode()) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize("said", [b"", b".", b"1.", b".5", b"-1", b"1e3", b" 1", b"1.2.3", b"1" * 10, b"1.1234567"])
def test_what_is_no_number_of_milliseconds_is_not_read(said: bytes) -> None:
    assert stated_s(said) is None


A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)
Coefficients = tuple[float, ...]
LAWS = [(0.05, 80e-6, 60e-6, 1e-4), (0.002, 1e-6, 2e-6, 1e-5), (0.3, 1e-4, 0.0, 5e-3)]
ASKED = (1000.0, 2000.0, 10.0)


def features(seed: int, number: int) -> tuple[float, ...]:
    """Return uncached tokens, queued tokens and running requests of one request."""
    draws = [choice_index(seed, limit, 3 * number + at) for at, limit in enumerate((8192, 20_000, 128))]
    return tuple(float(each) for each in draws)


def by_law(law: Coefficients, of: tuple[float, ...]) -> float:
    return law[0] + sum(each * feature for each, feature in zip(law[1:], of, strict=True))


def taught(law: Coefficients, *, times: int = 1500, noise: float = 0.0) -> LatencyModel:
    model = LatencyModel(TTFT)
    teach(model, law, seed=1, times=times, noise=noise)
    return model


def teach(model: LatencyModel, law: Coefficients, *, seed: int, times: int, noise: float = 0.0) -> None:
    for number in range(times):
        of = features(seed, number)
        stray = 1.0 + noise * (2.0 * unit_interval(seed, number) - 1.0)
        model.learn(A0, of, by_law(law, of) * stray)


def worst_error(model: LatencyModel, law: Coefficients) -> float:
    asked = [features(99, number) for number in range(50)]
    return max(abs(model.predict(A0, of) / by_law(law, of) - 1.0) for of in asked)


@pytest.mark.parametrize("law", LAWS)
def test_a_linear_law_is_found_through_noise(law: Coefficients) -> None:
    assert worst_error(taught(law, times=3000, noise=0.2), law) < 0.15


def test_what_was_once_true_is_forgotten() -> None:
    model = taught(LAWS[0])
    slower = tuple(3.0 * each for each in LAWS[0])
    teach(model, slower, seed=2, times=1500)
    assert worst_error(model, slower) < 0.01


def test_features_that_never_vary_do_not_hinder_learning() -> None:
    model = LatencyModel(TTFT)
    for number in range(20_000):
        model.learn(A0, (float(choice_index(1, 8192, number)), 0.0, 0.0), 0.04 if number < 19_000 else 0.08)
    assert model.predict(A0, (1000.0, 0.0, 0.0)) == pytest.approx(0.08, rel=0.02)


def test_one_stray_measurement_moves_little_and_a_greater_one_no_more() -> None:
    moved = []
    for stray_s in (5.0, SECONDS_MAX):
        model = taught(LAWS[0])
        before = model.predict(A0, ASKED)
        model.learn(A0, ASKED, stray_s)
        moved.append(model.predict(A0, ASKED) / before)
    assert moved[0] == moved[1] < 1.2


amounts = st.floats(0.0, FEATURE_MAX)
Measurements = list[tuple[float, float, float, float]]


@given(
    st.lists(st.tuples(amounts, amounts, amounts, st.floats(1e-6, SECONDS_MAX)), max_size=60),
    st.tuples(amounts, amounts, amounts),
)
def test_whatever_was_measured_a_prediction_is_a_number_and_never_negative_and_variances_stay_bounded(
    told: Measurements, asked: tuple[float, float, float]
) -> None:
    model = LatencyModel(TTFT)
    for *of, seconds in told * 5:
        model.learn(A0, tuple(of), seconds)
    assert 0.0 <= model.predict(A0, asked) < math.inf
    for fit in model.fits.values():
        for at, prior in enumerate(model.variances):
            assert 0.99 * VARIANCE_MIN * prior <= fit.covariance[at][at] <= 1.01 * VARIANCE_MAX * prior
