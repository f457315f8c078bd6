"""Small tokenizers of each kind, trained on a few sentences."""

import json
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROUND_TRIPS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)
"""Any text that UTF-8 can encode."""

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Hello world, hello 世界 and 2024!",
    "naïve café 👋",
] * 4
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """As GPT-2, SmolLM2, Qwen and Llama 3 have it, with an added token that has text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken(name, special=False, normalized=False) for name in ("<think>", "<|user|>")]
    )
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces as ▁, unknown characters as byte tokens, <s> in front."""
    letters = [*sorted(set(CORPUS[0]) - {" "}), "▁"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "f")]
    names += ["th", "the", "▁the", "▁f"]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, template: str | None = CHATML, eos: str = "<|im_end|>") -> Path:
    """A model folder as far as text goes."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
