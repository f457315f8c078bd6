"""Writes a config.json of a small Llama with some fields changed or removed."""

import json
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def write_config(folder: Path, **fields: Any) -> Path:
    kept = {name: value for name, value in (BASE | fields).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder
