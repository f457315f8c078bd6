"""Masks depend only on the text, not on the steps it came in, other rows or earlier failures."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from kernels import grammar
from kernels.grammar import GrammarError, Grammars, GrammarSlots, TokenMask, TokenVocabulary
from scheduler.plan import SamplingParams, ScheduledRow

WORDS = ("the", "yes", "no", "ye", "es", '{"', '":', '", "', "ab", "aa", "1,", "true", "name", "\n ", "日")
TOKENS = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + [b"", b"", b""]
EOS = frozenset({len(TOKENS) - 3, len(TOKENS) - 1})
SPECIAL = len(TOKENS) - 2
PADDED_SIZE = len(TOKENS) + 13
"""As models pad their vocabulary; no multiple of 32."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TokenVocabulary(TOKENS, EOS), PADDED_SIZE)


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def row(
    text: str, generated: Sequence[int], *, first: bool, slot: int = 0, request_id: str = "r"
) -> ScheduledRow:
    return ScheduledRow(
        request_id=request_id,
        slot=slot,
        token_ids=(generated[-1] if generated else 65,),
        num_computed_tokens=8 + len(generated),
        block_table=(0,),
        sampling=SamplingParams(seed=0, grammar=text),
        num_generated_tokens=len(generated),
        history=((65,), tuple(generated)) if first else None,
    )


def ids(mask: TokenMask) -> list[int]:
    allowed: list[int] = mask.unpacked().nonzero()[0].tolist()
    return allowed


def spelled(token_ids: Sequence[int]) -> list[bytes]:
    return [TOKENS[token_id] for token_id in token_ids]


def test_a_mask_holds_every_token_that_goes_on_and_no_other(grammars: Grammars) -> None:
    slots = GrammarSlots(grammars)

    assert spelled(ids(slots.mask(row(regex("(yes|no)"), [], first=True)))) == [
        b"n",
        b"y",
        b"yes",
        b"no",
        b"ye",
    ]
    after_ye = slots.mask(row(regex("(yes|no)"), [TOKENS.index(b"ye")], first=False))
    assert spelled(ids(after_ye)) == [b"s"]


def test_every_end_token_is_allowed_exactly_where_the_text_may_end(grammars: Grammars) -> None:
    slots, text = GrammarSlots(grammars), regex("a(bb)?")

    at_start, after_a, after_ab, after_abb = (
        set(ids(slots.mask(row(text, generated, first=True))))
        for generated in ([], [97], [97, 98], [97, 98, 98])
    )

    assert not at_start & EOS
    assert after_a >= EOS
    assert not after_ab & EOS
    assert after_abb == EOS
    assert not (at_start | after_a | after_ab) & {SPECIAL, *range(len(TOKENS), PADDED_SIZE)}


# No \d: Python and llguidance count different Unicode versions' digits.
@pytest.mark.parametrize("pattern", ["ab", "ab+", "ab?"])
@pytest.mark.parametrize("end", sorted(EOS))
def test_behind_an_end_only_ends_are_allowed_and_the_compiled_grammar_stays(
    grammars: Grammars, pattern: str, end: int
) -> None:
    """With look-ahead such a row is planned before its token is known, whether the text could have gone on or not."""
    slots, text = GrammarSlots(grammars), regex(pattern)
    grammars.prepare(text)
    compiled = grammars._templates[text].matcher
    generated = [97, 98]
    for _ in range(3):
        mask = slots.mask(row(text, generated, first=len(generated) == 2))
        again = slots.mask(row(text, generated, first=False))  # a step that is run once more
        rebuilt = GrammarSlots(grammars).mask(row(text, generated, first=True))
        np.testing.assert_array_equal(mask.words, again.words)
        np.testing.assert_array_equal(mask.words, rebuilt.words)
        assert set(ids(mask)) >= EOS
        assert generated[-1] != end or (set(ids(mask)) == EOS and mask.is_within(EOS))
        generated.append(end)
    assert grammars._templates[text].matcher is compiled


@settings(max_examples=40, deadline=None)
@given(
    pattern=st.sampled_from(
        [r"(yes|no|the name)+", r"[a-c]{2,9}x?", r"[0-9]+(,[0-9]+)*", r'\{"name": "[^"]*"\}', "日*a{3}"]
    ),
    choices=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_rebuilt_from_history_after_preemption_gives_the_same_masks(
    grammars: Grammars, pattern: str, choices: list[int]
) -> None:
    text, slots, generated = regex(pattern), GrammarSlots(grammars), []
    for choice in choices:
        mask = slots.mask(row(text, generated, first=not generated))
        rebuilt = GrammarSlots(grammars).mask(row(text, generated, first=True, slot=5))
        again = slots.mask(row(text, generated, first=False))  # a step that is run once more

        np.testing.assert_array_equal(mask.words, rebuilt.words)
        np.testing.assert_array_equal(mask.words, again.words)
        complete = re.fullmatch(pattern, b"".join(spelled(generated)).decode(errors="surrogateescape"))
        assert bool(complete) == (set(ids(mask)) >= EOS)
        allowed = [token_id for token_id in ids(mask) if token_id not in EOS]
        if not allowed:
            break
        generated.append(allowed[choice % len(allowed)])


def test_requests_that_share_a_grammar_do_not_share_a_state(grammars: Grammars) -> None:
    slots, text = GrammarSlots(grammars), regex("a[bc]d|x")
    slots.mask(row(text, [], first=True, slot=0, request_id="one"))
    slots.mask(row(text, [], first=True, slot=1, request_id="two"))

    assert spelled(ids(slots.mask(row(text, [97], first=False, slot=0, request_id="one")))) == [b"b", b"c"]
    assert set(ids(slots.mask(row(text, [120], first=False, slot=1, request_id="two")))) == EOS


def test_a_slot_is_free_for_the_next_request_after_its_release(grammars: Grammars) -> None:
    slots = GrammarSlots(grammars)
    slots.mask(row(regex("ab"), [], first=True))
    slots.release([0, 3])

    assert spelled(ids(slots.mask(row(regex("cd"), [], first=True, request_id="next")))) == [b"c"]
    with pytest.raises(AssertionError, match="without history"):
        slots.mask(row(regex("cd"), [99], first=False, slot=1))


@pytest.mark.parametrize(
    "generated",
    [
        [98],
        [97, 97],
        [97, len(TOKENS) + 500],
        [97, -1],
        [SPECIAL],
        [97, min(EOS)],
        [97, 98, min(EOS), 97],
        [min(EOS)],
    ],
)
def test_tokens_that_break_the_grammar_are_an_error_of_that_row(
    grammars: Grammars, generated: list[int]
) -> None:
    slots = GrammarSlots(grammars)
    with pytest.raises(GrammarError):
        slots.mask(row(regex("ab"), generated, first=True))

    # Forced text has one tokenization.
    assert spelled(ids(slots.mask(row(regex("ab"), [], first=True, slot=1)))) == [b"ab"]


def test_bad_regex_or_grammar_is_an_error_and_kills_nothing(grammars: Grammars) -> None:
    for text in (regex("(["), regex("(?=a)b"), regex("(" * 2000), "no json", "{}", ""):
        with pytest.raises(GrammarError) as raised:
            grammars.prepare(text)
        assert len(str(raised.value)) <= 200
        with pytest.raises(GrammarError):
            GrammarSlots(grammars).mask(row(text, [], first=True))
    grammars.prepare(regex("fine"))


def test_regex_of_a_million_copies_ends_its_row_after_a_bounded_time(grammars: Grammars) -> None:
    slots, text, generated = GrammarSlots(grammars), regex("(a{1000}){1000}"), list[int]()
    error, slowest_s = "", 0.0
    while not error and len(generated) < 200:
        started_s = time.thread_time()
        try:
            slots.mask(row(text, generated, first=not generated))
        except GrammarError as failure:
            error = str(failure)
        slowest_s = max(slowest_s, time.thread_time() - started_s)
        generated.append(97)
    assert re.search("too many|processor time", error)

    unlimited, spent_s = LLMatcher(grammars._tokenizer, text, log_level=0), 0.0
    for _ in generated:
        started_s = time.thread_time()
        unlimited.compute_bitmask()
        unlimited.consume_token(97)
        spent_s += time.thread_time() - started_s
    # Both are processor time of this thread, for the same tokens; without limits it is 18 times as much.
    assert slowest_s * 3 < spent_s


def test_a_grammar_that_is_slow_at_every_token_ends_its_own_row(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "CPU_BUDGET_S", -1.0)
    with pytest.raises(GrammarError, match="processor time"):
        GrammarSlots(grammars).mask(row(regex("a+"), [], first=True))


def test_what_exhausts_a_lexer_is_not_inherited_by_the_next_request(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, slots = regex("[a-z]+ok"), GrammarSlots(grammars)
    grammars.prepare(text)
    compiled = grammars._templates[text].matcher
    with pytest.raises(GrammarError):
        slots.mask(row(text, [48], first=True))

    slots.mask(row(text, [], first=True))
    assert grammars._templates[text].matcher is not compiled


def test_compiled_grammars_are_bounded_in_number_and_in_use(grammars: Grammars) -> None:
    for number in range(grammar.MAX_TEMPLATES + 5):
        grammars.prepare(regex(f"x{number}"))
    assert len(grammars._templates) == grammar.MAX_TEMPLATES

    text = regex("shared")
    grammars.prepare(text)
    compiled = grammars._templates[text].matcher
    for _ in range(grammar.MAX_USES - 1):
        grammars.prepare(text)
    assert grammars._templates[text].matcher is compiled
    grammars.prepare(text)
    assert grammars._templates[text].matcher is not compiled


def test_compiling_on_another_thread_while_the_step_thread_masks(grammars: Grammars) -> None:
    failures: list[BaseException] = []

    def compile_many() -> None:
        try:
            for number in range(200):
                grammars.prepare(regex(f"(a|b){{1,{number + 1}}}"))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=compile_many)
    thread.start()
    masks = [
        GrammarSlots(grammars).mask(row(regex(f"(a|b){{1,{number + 1}}}"), [97], first=True))
        for number in range(200)
    ]
    thread.join()

    assert not failures
    assert all(97 in ids(mask) or set(ids(mask)) == EOS for mask in masks)


def test_a_row_with_a_grammar_but_no_vocabulary_is_an_error() -> None:
    with pytest.raises(GrammarError, match="vocabulary"):
        GrammarSlots().mask(row(regex("a"), [], first=True))
    with pytest.raises(GrammarError, match="end-of-sequence"):
        Grammars(TokenVocabulary(TOKENS, frozenset()), len(TOKENS))


def test_only_the_grammar_asks_for_the_history() -> None:
    plain = SamplingParams(seed=0)

    assert not plain.needs_history
    assert replace(plain, grammar=regex("a")).needs_history
    assert not replace(plain, grammar=regex("a")).has_penalties


@pytest.mark.process
def test_needs_no_torch() -> None:
    code = "import sys, kernels.grammar; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
