"""The detokenizer against the plain definition: decode everything, cut at the stop string that is complete first."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.text import ByteTokenizer, Detokenizer
from service.text.stop_strings import StopMatcher

# Two letters, so that stop strings overlap one another and themselves; or characters of one to four bytes, joined
# emoji and tags.
MIXED = "ab<k> \n世界é👋🏽\u200d"
TEXT = st.text(alphabet="ab", max_size=24) | st.text(alphabet=MIXED, max_size=40)
STOPS = st.lists(
    st.text(alphabet="ab", min_size=1, max_size=5) | st.text(alphabet=MIXED, min_size=1, max_size=4),
    max_size=4,
).map(tuple)


def cut_at_first_stop(text: str, stops: tuple[str, ...], first: int = 0) -> str:
    """By definition: of all stop strings complete at the earliest character (not before `first`), the longest."""
    for end in range(first, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


def of_pieces(pieces: list[bytes], stop: tuple[str, ...] = (), min_tokens: int = 0) -> Detokenizer:
    """One whose token ids are positions in `pieces`."""
    return Detokenizer(lambda token_id: pieces[token_id], stop=stop, min_tokens=min_tokens)


@given(TEXT, STOPS, st.lists(st.integers(0, 200), max_size=30))
def test_stop_string_holdback_splits_tags_joined_deltas_equal_truncated_text_for_any_token_split(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    pieces = split(text.encode(), cuts)
    detokenizer = of_pieces(pieces, stops)
    deltas = [detokenizer.feed([token_id]) for token_id in range(len(pieces))]
    deltas.append(detokenizer.finish())
    expected = cut_at_first_stop(text, stops)
    assert "".join(deltas) == expected == detokenizer.text
    assert detokenizer.stopped == (expected != text or (bool(stops) and any(stop in text for stop in stops)))


@given(st.binary(max_size=40), STOPS, st.lists(st.integers(0, 200), max_size=30))
def test_any_bytes_decode_as_the_whole_would(data: bytes, stops: tuple[str, ...], cuts: list[int]) -> None:
    pieces = split(data, cuts)
    detokenizer = of_pieces(pieces, stops)
    text = "".join(detokenizer.feed([token_id]) for token_id in range(len(pieces))) + detokenizer.finish()
    assert text == cut_at_first_stop(data.decode(errors="replace"), stops)


@given(TEXT, STOPS, st.lists(st.integers(0, 200), max_size=30), st.lists(st.integers(0, 200), max_size=6))
def test_released_text_depends_on_the_tokens_and_not_on_their_grouping(
    text: str, stops: tuple[str, ...], cuts: list[int], groups: list[int]
) -> None:
    pieces = split(text.encode(), cuts)
    one_by_one, grouped = of_pieces(pieces, stops), of_pieces(pieces, stops)
    released = [""]
    for token_id in range(len(pieces)):
        one_by_one.feed([token_id])
        released.append(one_by_one.text)
    places = sorted({0, len(pieces), *(group % (len(pieces) + 1) for group in groups)})
    for start, end in pairwise(places):
        grouped.feed(range(start, end))
        assert grouped.text == released[end]
    assert one_by_one.finish() == grouped.finish()


@example("abb", ("ab", "abb"), 2)  # what is passed over may still grow into a longer stop string
@given(TEXT, STOPS, st.integers(0, 12))
def test_stop_strings_count_only_after_min_tokens(text: str, stops: tuple[str, ...], min_tokens: int) -> None:
    pieces = [character.encode() for character in text]
    detokenizer = of_pieces(pieces, stops, min_tokens)
    released = detokenizer.feed(range(len(pieces))) + detokenizer.finish()
    # With one character per token a stop string counts when its last character comes after min_tokens ones.
    assert released == cut_at_first_stop(text, stops, first=min_tokens + 1)


def test_prompt_text_leaks_into_the_first_delta_when_it_ends_in_a_partial_character() -> None:
    tokenizer = ByteTokenizer()
    hello = "tell me 世".encode()
    detokenizer = tokenizer.detokenizer(list(hello[:-1]))
    assert detokenizer.feed([hello[-1]]) == "\ufffd", "the character's last byte alone, nothing of the prompt"
    assert detokenizer.feed(list("界".encode())) == "界"


def test_character_is_released_by_its_last_byte_and_never_as_a_replacement() -> None:
    detokenizer = ByteTokenizer().detokenizer([])
    assert [detokenizer.feed([byte]) for byte in "👋é".encode()] == ["", "", "", "👋", "", "é"]


def test_only_the_possible_beginning_of_a_stop_string_is_held_back() -> None:
    detokenizer = ByteTokenizer().detokenizer([], ("</think>",))
    assert [detokenizer.feed([byte]) for byte in b"a<b</t"] == ["a", "", "<b", "", "", ""]
    assert detokenizer.feed(b"x") == "</tx"
    assert detokenizer.feed(b"</think>more") == ""
    assert detokenizer.stopped
    assert detokenizer.feed(b"more") == detokenizer.finish() == ""
    assert detokenizer.text == "a<b</tx"


def test_held_back_text_comes_out_at_the_end() -> None:
    detokenizer = ByteTokenizer().detokenizer([], ("STOP",))
    assert detokenizer.feed(b"go STO") == "go "
    assert detokenizer.finish() == "STO"
    assert detokenizer.finish() == ""
    assert not detokenizer.stopped


def test_unfinished_character_at_the_end_may_not_hide_a_stop_string() -> None:
    detokenizer = ByteTokenizer().detokenizer([], ("\ufffd",))
    assert detokenizer.feed(b"a\xe4") == "a"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped


def test_end_tokens_and_stop_ids_have_no_text() -> None:
    detokenizer = ByteTokenizer().detokenizer([], hidden_token_ids={ord(".")})
    assert detokenizer.feed([*b"ok", ord("."), ByteTokenizer.EOS, 9999]) == "ok"
    assert detokenizer.text == "ok"


class CountingMatcher(StopMatcher):
    """Counts what each character costs."""

    looked_up = 0

    def advance(self, state: int, character: str) -> int:
        self.looked_up += 1
        while state and character not in self._children[state]:
            self.looked_up += 1
            state = self._fallback[state]
        return self._children[state].get(character, 0)


@pytest.mark.parametrize("stop", ["a" * 256, "ab" * 127 + "b"])
@pytest.mark.parametrize("num_tokens", [1_000, 64_000])
def test_streaming_copies_the_whole_token_list_cost_per_token_stays_flat(stop: str, num_tokens: int) -> None:
    matcher = CountingMatcher((stop,))
    built, state, deepest = matcher.looked_up, 0, 0
    for position in range(num_tokens):
        state = matcher.advance(state, "ab"[position % 2])
        deepest = max(deepest, matcher.held(state))
    assert matcher.looked_up - built <= 2 * num_tokens, "amortised: no more falls than steps"
    assert deepest < len(stop)


def test_long_output_keeps_a_bounded_window() -> None:
    stop = "ab" * 100 + "!"
    calls = 0

    def token_bytes(token_id: int) -> bytes:
        nonlocal calls
        calls += 1
        return b"ab"

    detokenizer = Detokenizer(token_bytes, stop=(stop,))
    released = 0
    for _ in range(20_000):
        released += len(detokenizer.feed((0,)))
        assert detokenizer.num_held_chars < len(stop)
    assert calls == 20_000, "each token is decoded once"
    assert released == 40_000 - detokenizer.num_held_chars


def test_longest_of_the_stop_strings_that_end_together_wins() -> None:
    detokenizer = ByteTokenizer().detokenizer([], ("b", "ab", "zab"))
    assert detokenizer.feed(b"xzab") == "x"
    assert detokenizer.stopped
