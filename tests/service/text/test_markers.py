"""Names of special tokens in users' text."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from service.text.markers import Markers

NAMES = ("<s>", "</s>", "<|a|>", "<|ab|>", "[X]", "<<s>>", "<|end_of_a|>", "<|end_of_b|>", "<|end_of")
PIECES = st.sampled_from([*NAMES, "<|end_", "of_", "<", ">", "s", "|", "a", "[", "X]", "text"])


@given(pieces=st.lists(PIECES, max_size=12))
def test_no_name_is_whole_after_breaking_up_and_nothing_is_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    markers = Markers(NAMES)

    broken = markers.broken_up(text, "\ufdd0").split("\ufdd0")

    assert "".join(broken) == text
    assert not any(name in piece for name, piece in itertools.product(NAMES, broken))
    assert markers.any_in(text) == any(name in text for name in NAMES) == (len(broken) > 1)


def test_single_characters_and_no_names_at_all_leave_text_alone() -> None:
    for markers in (Markers([]), Markers(["<"])):
        assert not markers.any_in("a < b")
        assert markers.broken_up("a < b", "|") == "a < b"


def test_text_of_nothing_but_beginnings_of_names_costs_no_lookups() -> None:
    """900,000 of `<` took a second, with the interpreter lock."""
    markers = Markers([*(f"<|special_{number}|>" for number in range(6_000)), "<s>", "</s>"])
    assert markers._beginning is not None
    for text in ("<" * 1000, "<|" * 1000, "<|spec" * 1000, "</" * 1000):
        assert not list(markers._beginning.finditer(text))
        assert not markers.any_in(text)
    assert markers.broken_up("<<|special_5999|>", "+") == "<<+|special_5999|>"
