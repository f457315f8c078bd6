"""Gemma's vocabulary: pieces with scores and byte fallback from GGUF, small ones and the real one."""

import itertools
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from service.errors import JobError
from service.text import ModelTokenizer, load_tokenizer
from tests.kernels.needs import real_model

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
OWN = ["\n", "\n\n", "  ", "   "]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = {
    **dict.fromkeys("▁abcdelmorsu.", -50.0),
    "ab": -3.0,
    "bc": -2.0,
    "abc": -4.0,
    "▁a": -1.0,
    "▁ab": -9.0,
    "cd": -8.0,
    "abcd": -5.0,
    "▁abcd": -6.0,
    "bcd": -7.0,
    "aa": -10.0,
    "user": -12.0,
    "us": -11.0,
    "er": -11.5,
    "model": -20.0,
    "mo": -13.0,
    "del": -15.0,
    "de": -14.0,
}


def write_vocabulary(path: Path) -> Path:
    names = [*SPECIAL, *OWN, *BYTES, *PIECES]
    writer = GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_scores([-1000.0] * (len(names) - len(PIECES)) + list(PIECES.values()))
    kinds = [CONTROL] * len(SPECIAL) + [USER_DEFINED] * len(OWN) + [BYTE] * 256
    writer.add_token_types(kinds + [1] * len(PIECES))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    loaded = load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("spm") / "m.gguf"))
    assert isinstance(loaded, ModelTokenizer)
    return loaded


def pieces_of(text: str) -> list[str]:
    """SentencePiece's rule, written plainly: join the best-scored pair of neighbours until none makes a piece."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        joined = [(PIECES.get(a + b), a + b) for a, b in itertools.pairwise(symbols)]
        scores = [score for score, _ in joined if score is not None]
        if not scores:
            return symbols
        at = next(idx for idx, (score, _) in enumerate(joined) if score == max(scores))
        symbols[at : at + 2] = [joined[at][1]]


@given(text=st.text(alphabet="abcd ", max_size=40).filter(lambda text: "  " not in text))
def test_pieces_are_joined_by_score(tokenizer: ModelTokenizer, text: str) -> None:
    ids = tokenizer.encode_prompt(text)
    assert [tokenizer._tokenizer.id_to_token(i) for i in ids[1:]] == pieces_of(text)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁<"), max_size=40))
def test_text_comes_back_token_by_token(tokenizer: ModelTokenizer, text: str) -> None:
    ids = tokenizer.encode_prompt(text)
    assert ids[0] == 2
    assert 3 not in ids, "characters without a piece become bytes, not <unk>"
    detokenizer = tokenizer.detokenizer(ids)
    assert "".join(detokenizer.feed([i]) for i in ids) + detokenizer.finish() == text


def test_runs_of_spaces_and_lines_are_single_tokens(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode_prompt("ab  a\n\nabc")
    assert [tokenizer.token_text(i) for i in ids] == ["<bos>", "ab", "  ", "a", "\n\n", "abc"]


def test_chat_has_its_turns_and_ends_where_one_ends(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "abcd <end_of_turn>"}])
    assert [tokenizer.token_text(i) for i in ids[:5]] == ["<bos>", "<start_of_turn>", "user", "\n", "abcd"]
    assert [tokenizer.token_text(i) for i in ids[-4:]] == ["\n", "<start_of_turn>", "model", "\n"]
    assert ids.count(5) == 1, "what a user writes ends no turn"
    assert tokenizer.eos_token_ids == {1, 5}
    assert tokenizer.decode([ids[2], 5]) == "user"


@pytest.fixture(scope="module")
def gemma() -> ModelTokenizer:
    loaded = load_tokenizer(real_model("gemma3-270m").path)
    assert isinstance(loaded, ModelTokenizer)
    return loaded


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [2, 818, 5279, 529, 7001, 563]),
        (
            " two  spaces\n\nIn 2024, naïve 👋 世界\tx",
            [
                *(2, 1156, 138, 35220, 108, 902, 236743, 236778, 236771, 236778, 236812, 236764),
                *(120362, 155818, 84679, 255968, 236781),
            ],
        ),
        ("hi<end_of_turn>\n", [2, 2202, 106, 107]),
    ],
)
def test_ids_of_gemma_are_those_that_transformers_gives(
    gemma: ModelTokenizer, text: str, ids: list[int]
) -> None:
    # Recorded from AutoTokenizer of transformers 5.24 on the same file.
    assert gemma.encode_prompt(text) == ids


@pytest.mark.model
def test_gemma_ends_at_a_turn_and_says_that_it_has_no_template(gemma: ModelTokenizer) -> None:
    assert gemma.eos_token_ids == {1, 106}
    assert gemma.vocab_size == 262_144
    with pytest.raises(JobError, match="the model has no chat template; use prompt"):
        gemma.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.model
def test_everyday_text_round_trips_with_gemma(gemma: ModelTokenizer) -> None:
    text = "Grüße, 世界! 👋🏽 «Привет»\n\n\tdef f(x):  return x**2  # ½ – שלום العربية 한국어 \x01"
    assert gemma.decode(gemma.encode_prompt(text)) == text
