"""Runs `tailrace bench` on a model of a few kilobytes."""

import subprocess
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.kernels.tiny import make_model, save
from tests.service.cli.conftest import ROOT, clean_env, command


def run_bench(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command("bench", *arguments),
        env=clean_env(**env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def save_tiny_model(folder: Path) -> Path:
    """A random Llama whose tokens are the printable characters of ASCII."""
    save(make_model("llama"), folder)
    letters = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ"]  # the last two: space and new line
    vocab = {letter: token_id for token_id, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
