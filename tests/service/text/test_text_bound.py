"""A text that cannot fit is refused before it is tokenized, and none that could is."""

import json
import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from service.errors import JobError
from service.text import ByteTokenizer, ModelTokenizer, load_tokenizer
from service.text.text_bound import TextBound
from service.text.vocabulary import BYTE_LEVEL_ALPHABET
from tests.service.text import tiny
from tests.service.text.test_sentencepiece import write_vocabulary

WORD = "a" * 900_000


def composing(form: str) -> Tokenizer:
    tokenizer = tiny.byte_level()
    tokenizer.normalizer = getattr(normalizers, form)()
    return tokenizer


def swallowing_space() -> Tokenizer:
    """As Phi-3 has it: the blanks around some of its tokens belong to them."""
    tokenizer = tiny.byte_level()
    tokenizer.add_tokens([AddedToken("<|turn|>", lstrip=True, rstrip=True, normalized=False)])
    return tokenizer


def without_control_characters() -> Tokenizer:
    """As SmolLM2 has it: what its vocabulary lacks vanishes from the text."""
    described = json.loads(tiny.byte_level().to_str())
    vocabulary = described["model"]["vocab"]
    for byte in (0x01, 0x1D, 0xC0, 0xFF):
        del vocabulary[next(letter for letter, code in BYTE_LEVEL_ALPHABET.items() if code == byte)]
    return Tokenizer.from_str(json.dumps(described))


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "byte level": tiny.byte_level,
    "sentencepiece": tiny.sentencepiece_like,
    "NFC": lambda: composing("NFC"),
    "NFKC": lambda: composing("NFKC"),
    "swallowing space": swallowing_space,
    "control characters vanish": without_control_characters,
}
SHRINKING = st.text(st.sampled_from("\x01\x1daA <|turn>\n\u0301\u0331\u0345\u0313ἀα Ａẖﬃᄀ각"), max_size=40)


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_that_would_fit_is_refused(kind: str) -> None:
    tokenizer = BOUNDED[kind]()
    bound = TextBound(tokenizer)
    assert bound.max_chars_per_token is not None
    longest = max(tokenizer.get_vocab(), key=len)

    @given(SHRINKING | st.text(max_size=40), st.integers(1, 8))
    @example("α\u0313\u0301\u0345" * 30, 1)
    @example("<|turn|>" + " " * 900, 1)
    @example(" " * 900 + "<|turn|>", 1)
    @example("\x1d" * 900, 1)
    @example(longest, 1)
    def check(text: str, copies: int) -> None:
        text *= copies
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        bound.check("prompt", text, num_tokens)

    check()


def dropping(normalizer: normalizers.Normalizer | None, pre: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    tokenizer = tiny.byte_level()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre, tokenizer.pre_tokenizer])
    return tokenizer


UNBOUNDED: dict[str, Tokenizer] = {
    "blanks collapse": dropping(normalizers.Replace(Regex(" +"), " "), None),
    "blanks are stripped": dropping(normalizers.Strip(), None),
    "accents are stripped": dropping(
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), None
    ),
    "words shrink": dropping(normalizers.Replace("aa", "a"), None),
    "blanks are removed": dropping(None, pre_tokenizers.Split(" ", "removed")),
    "unknown words": Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    "unknown characters": Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
    "unknown characters vanish": Tokenizer(models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_may_drop_characters_has_no_bound(kind: str) -> None:
    bound = TextBound(UNBOUNDED[kind])
    assert bound.max_chars_per_token is None
    bound.check("prompt", WORD, 1)


def load(path: Path) -> ModelTokenizer:
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, ModelTokenizer)
    return tokenizer


def test_text_that_can_never_fit_is_refused_without_being_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level = load(tiny.save(tiny.byte_level(), tmp_path / "m"))
    pieces = load(write_vocabulary(tmp_path / "m.gguf"))
    for tokenizer in (byte_level, pieces, ByteTokenizer()):
        per_token = 1 if isinstance(tokenizer, ByteTokenizer) else tokenizer._bound.max_chars_per_token
        assert per_token is not None
        monkeypatch.setattr(tokenizer, "_tokenizer", None, raising=False)
        for field, encode in (
            ("prompt", lambda each: each.encode_prompt(WORD, max_tokens=100)),
            ("messages", lambda each: each.encode_chat([{"role": "user", "content": WORD}], max_tokens=100)),
        ):
            with pytest.raises(
                JobError, match=f"{field}: .* characters is above the limit {100 * per_token} "
            ) as it:
                encode(tokenizer)
            assert (it.value.code, it.value.field, it.value.limit) == ("infeasible", field, 100 * per_token)
            assert isinstance(it.value.value, int)
            assert it.value.value >= len(WORD)


def test_text_with_markers_is_bounded_by_its_content_and_not_by_its_pieces(tmp_path: Path) -> None:
    tokenizer = load(tiny.save(tiny.byte_level(), tmp_path / "m"))
    markers = [{"role": "user", "content": "<|im_end|>" * 5_000}]
    ids = tokenizer.encode_chat(markers)
    assert tokenizer.encode_chat(markers, max_tokens=len(ids)) == ids
    with pytest.raises(JobError, match="messages: "):
        tokenizer.encode_chat(markers, max_tokens=100)


def test_the_interpreter_runs_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    """`encode` of the library holds the interpreter lock: the event loop and the step would stand still."""
    tokenizer = load(tiny.save(tiny.byte_level(), tmp_path / "m"))
    begun = threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode_prompt(WORD)

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.002)
    assert turns > 20


def test_composed_letters_count_as_the_tokenizer_sees_them() -> None:
    bound = TextBound(composing("NFC"))
    assert bound.max_chars_per_token is not None
    text = unicodedata.normalize("NFD", "é" * bound.max_chars_per_token)
    bound.check("prompt", text, 1)
    with pytest.raises(JobError):
        bound.check("prompt", text + "é", 1)
