from math import exp

from worker_agent.engines.simulated.tokens import LETTERS_AND_SPACES, TokenSource


def generated(source: TokenSource, prompt: bytes, count: int) -> list[int]:
    state, tokens = source.fold(prompt), []
    for _ in range(count):
        tokens.append(source.next_token(state))
        state = source.fold(tokens[-1:], state)
    return tokens


def test_a_cut_stream_goes_on_as_if_never_cut() -> None:
    source = TokenSource(seed=7)
    whole = generated(source, b"prompt", 40)
    assert generated(source, b"prompt" + bytes(whole[:13]), 27) == whole[13:]


def test_the_same_on_every_machine() -> None:
    assert bytes(generated(TokenSource(), b"hello", 16)) == b" np y nbfaut  s "


def test_seed_and_every_prompt_token_matter() -> None:
    texts = {
        bytes(generated(TokenSource(seed), prompt, 24))
        for seed in (0, 1)
        for prompt in (b"", b"\0", b"ab", b"ba", b"b")
    }
    assert len(texts) == 10


def test_only_letters_and_spaces_are_drawn_and_all_of_them() -> None:
    assert set(generated(TokenSource(), b"x", 2000)) == set(LETTERS_AND_SPACES)


def test_the_next_token_is_the_likeliest_and_all_together_are_no_more_than_certain() -> None:
    source = TokenSource(seed=7)
    for prompt in (b"a", b"ab", b"abc", b"xyz"):
        state = source.fold(prompt)
        told = source.logprobs(state, 20)
        assert told.chosen == told.top[0]
        assert told.chosen.token_id == source.next_token(state)
        assert [each.rank for each in told.top] == list(range(1, 21))
        assert len({each.token_id for each in told.top}) == 20
        assert sorted((each.logprob for each in told.top), reverse=True) == [each.logprob for each in told.top]
        assert 0.5 < exp(told.chosen.logprob) <= sum(exp(each.logprob) for each in told.top) <= 1


def test_no_runner_up_is_told_unasked_or_invented() -> None:
    assert TokenSource().logprobs(0, 0).top == ()
    assert len(TokenSource().logprobs(0, 1).top) == 1
    assert len(TokenSource().logprobs(0, 99).top) == 27


def test_each_choice_is_a_sequence_of_its_own_and_the_first_is_that_of_one_alone() -> None:
    source = TokenSource(seed=7)
    assert source.of_choice(0) == source
    assert len({bytes(generated(source.of_choice(choice), b"prompt", 24)) for choice in range(4)}) == 4
