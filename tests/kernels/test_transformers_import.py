"""`kernels` is also the name of a package that transformers probes for: its models must import beside ours."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import kernels
assert not hasattr(kernels, "__version__")
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM
LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=1, num_key_value_heads=1))
assert kernels.__file__ is not None and kernels.__file__.startswith(ROOT), kernels.__file__
"""


def test_transformers_models_import_with_the_repository_first_on_the_path() -> None:
    code = f"import sys\nROOT = {str(ROOT)!r}\nsys.path.insert(0, ROOT)\n{CODE}"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_the_package_file_is_empty() -> None:
    assert (ROOT / "kernels" / "__init__.py").read_text().strip() in ("", '""""""')
