"""A text begins with the model's opening token once, whether the job, the template or the tokenizer writes it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from service.text import ModelTokenizer, load_tokenizer
from tests.kernels.needs import real_model
from tests.service.text import tiny
from tests.service.text.test_gguf_tokenizer import metadata_of, write_gguf
from tests.service.text.test_sentencepiece import write_vocabulary

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_level_folder(folder: Path) -> Path:
    tokenizer = tiny.byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    return tiny.save(tokenizer, folder, TEMPLATE)


def ending_token_too(folder: Path) -> Path:
    tokenizer = tiny.byte_level()
    pair = [("<|im_start|>", 0), ("<|endoftext|>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>", special_tokens=pair
    )
    return tiny.save(tokenizer, folder, TEMPLATE)


def two_opening_tokens(folder: Path) -> Path:
    """As ChatGLM has it."""
    tokenizer = tiny.byte_level()
    pair = [("<|im_start|>", 0), ("<|endoftext|>", 2)]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|im_start|> <|endoftext|> $A", special_tokens=pair),
        ]
    )
    return tiny.save(tokenizer, folder, TEMPLATE)


def sentencepiece_folder(folder: Path) -> Path:
    return tiny.save(tiny.sentencepiece_like(), folder, TEMPLATE, eos="</s>")


def gguf(pre: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir()
        metadata = metadata_of(tiny.byte_level(), pre) | {
            "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": TEMPLATE,
        }  # fmt: skip
        return write_gguf(folder / "m.gguf", metadata)

    return write


def sentencepiece_gguf(folder: Path) -> Path:
    folder.mkdir()
    return write_vocabulary(folder / "m.gguf")


KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "byte-level folder": (byte_level_folder, "<|im_start|>"),
    "ending token too": (ending_token_too, "<|im_start|>"),
    "two opening tokens": (two_opening_tokens, "<|im_start|><|endoftext|>"),
    "sentencepiece folder": (sentencepiece_folder, "<s>"),
    "gpt-2 gguf": (gguf("gpt-2"), "<|im_start|>"),
    "llama-bpe gguf": (gguf("llama-bpe"), "<|im_start|>"),
    "qwen2 gguf": (gguf("qwen2"), "<|im_start|>"),
    "sentencepiece gguf": (sentencepiece_gguf, "<bos>"),
}


def load(path: Path) -> ModelTokenizer:
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, ModelTokenizer)
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_that_writes_the_opening_token_itself_gets_it_once(tmp_path: Path, kind: str) -> None:
    write, opening = KINDS[kind]
    tokenizer = load(write(tmp_path / "m"))
    backend: Tokenizer = tokenizer._tokenizer
    bos = backend.encode(opening, add_special_tokens=False).ids
    words = "the quick" if "sentencepiece" not in kind else "abc"

    plain, by_hand = tokenizer.encode_prompt(words), tokenizer.encode_prompt(opening + words)
    assert plain[: len(bos)] == bos
    assert plain[len(bos) : 2 * len(bos)] != bos
    assert by_hand[: len(bos)] == bos
    assert by_hand[len(bos) : 2 * len(bos)] != bos
    assert len(by_hand) <= len(plain), "nothing else is lost or added"
    assert tokenizer.decode(by_hand).strip() == tokenizer.decode(plain).strip() == words
    assert tokenizer.encode_prompt(opening) == tokenizer.encode_prompt("")
    twice = tokenizer.encode_prompt(opening * 2 + words)
    assert twice[: 2 * len(bos)] == bos * 2, "who writes it twice has it twice"
    assert twice[2 * len(bos) :] == by_hand[len(bos) :]
    inside = tokenizer.encode_prompt(words + opening)
    assert sum(1 for i in inside if i == bos[0]) == 2, "one in front and one where it was written"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two opening tokens"])
def test_chat_template_that_prints_the_opening_token_gets_it_once(tmp_path: Path, kind: str) -> None:
    write, opening = KINDS[kind]
    path = write(tmp_path / "m")
    if path.is_dir():
        config = path / "tokenizer_config.json"
        config.write_text(config.read_text().replace("{", f'{{"bos_token": "{opening}", ', 1))
    tokenizer = load(path)
    bos = tokenizer._tokenizer.token_to_id(opening)
    for content in ("abc", f"{opening}abc", f"abc {opening}"):
        ids = tokenizer.encode_chat([{"role": "user", "content": content}])
        assert ids[0] == bos
        assert ids.count(bos) == 1, "a user's own is text"


@pytest.mark.model
def test_gemma_begins_once() -> None:
    gemma = load(real_model("gemma3-270m").path)
    assert gemma.encode_prompt("<bos>The capital of France is") == [2, 818, 5279, 529, 7001, 563]
