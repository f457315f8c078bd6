"""Finds and reads a model's tokenizer."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from kernels.errors import ModelFileError
from kernels.weights.gguf_file import read_gguf_metadata
from service.errors import SettingsError
from service.text import gguf_tokenizer
from service.text.chat_template import ChatTemplate
from service.text.tokenizer import ByteTokenizer, ModelTokenizer, Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(model_path: Path | None) -> Tokenizer:
    """Load the tokenizer of a model folder or a GGUF file; without a path, the deterministic engine's.

    Reads files only, never the network. `tokenizer.json` and byte-level GGUF take about half a second, Gemma's quarter
    of a million pieces two seconds; other forms go through transformers and take seconds to a minute. Raises
    SettingsError when no tokenizer can be read.
    """
    if model_path is None:
        return ByteTokenizer()
    if model_path.is_file():
        return _from_gguf(model_path)
    if (model_path / "tokenizer.json").is_file():
        return _from_folder(model_path)
    if not model_path.is_dir():
        raise SettingsError(f"model: {model_path} is neither a folder nor a GGUF file")
    gguf_files = sorted(model_path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _from_gguf(gguf_files[0])
    return _from_transformers(model_path, gguf_file=None, end_token_ids=_configured_ends(model_path))


def _from_gguf(path: Path) -> ModelTokenizer:
    try:
        metadata = read_gguf_metadata(path)
    except ModelFileError as error:
        raise SettingsError(f"model: {error}") from None
    ends = gguf_tokenizer.end_token_ids(metadata)
    if not gguf_tokenizer.can_build(metadata):
        return _from_transformers(path.parent, gguf_file=path.name, end_token_ids=ends)
    source = metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source, gguf_tokenizer.special_names(metadata)) if source else None
    tokenizer = gguf_tokenizer.build_tokenizer(metadata, path)
    return ModelTokenizer(tokenizer, chat_template=template, end_token_ids=ends)


def _from_folder(folder: Path) -> ModelTokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception for every kind of broken file
        raise SettingsError(f"model: {folder / 'tokenizer.json'} cannot be read: {error}") from None
    config = _json(folder / "tokenizer_config.json")
    names = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    ends = set(_configured_ends(folder))
    if "eos_token" in names and (eos_id := tokenizer.token_to_id(names["eos_token"])) is not None:
        ends.add(eos_id)
    return ModelTokenizer(
        tokenizer, chat_template=_folder_template(folder, config, names), end_token_ids=frozenset(ends)
    )


def _folder_template(folder: Path, config: dict[str, Any], names: dict[str, str]) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return ChatTemplate(source, names) if source else None


def _configured_ends(folder: Path) -> frozenset[int]:
    """Return the end ids of the generation configuration, else of the model's configuration."""
    for file in ("generation_config.json", "config.json"):
        ids = _json(folder / file).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise SettingsError(f"model: {path} cannot be read: {error}") from None
    return document if isinstance(document, dict) else {}


def _token_text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _from_transformers(
    folder: Path, *, gguf_file: str | None, end_token_ids: frozenset[int]
) -> ModelTokenizer:
    from transformers import AutoTokenizer  # seconds to import, and few models need it

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), **options)
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError) as error:
        name = gguf_file or folder.name
        raise SettingsError(f"model: no tokenizer can be read from {name}: {error}") from None
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is None:
        raise SettingsError(f"model: {type(theirs).__name__} has no fast tokenizer, which is needed")
    names = {name: text for name in _SPECIAL_NAMES if (text := _token_text(getattr(theirs, name, None)))}
    source = theirs.chat_template if isinstance(theirs.chat_template, str) else None
    ends = end_token_ids | ({theirs.eos_token_id} if theirs.eos_token_id is not None else set())
    template = ChatTemplate(source, names) if source else None
    return ModelTokenizer(backend, chat_template=template, end_token_ids=frozenset(ends))
