"""Names of special tokens in other people's words."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from service.text.markers import Markers

NAMES = ("<s>", "</s>", "<|a|>", "<|ab|>", "[X]", "<<s>>")
PIECES = st.sampled_from([*NAMES, "<", ">", "s", "|", "a", "[", "X]", "text"])


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
