"""How the register tile multiplies bfloat16: set once in a process, when its first model is loaded.

Compiled kernels depend on it, so nothing is compiled before it is set, and it never changes afterwards.
"""

from enum import StrEnum

from kernels.ops.cpu.features import processor_features


class Product(StrEnum):
    DOT = "dot"
    """vdpbf16ps: pairs of bfloat16, summed in float32"""
    FMA = "fma"
    """float32 multiplications: the right-hand matrix is widened in registers, the left-hand one beforehand"""
    INT8 = "int8"
    """vpdpbusd: fours of unsigned by signed bytes, summed in int32"""


_chosen: Product | None = None


def set_bf16_product(product: Product) -> None:
    """Let this process multiply by DOT or FMA.

    Raises ValueError where the processor lacks it or the process computes with the other one already.
    """
    global _chosen  # noqa: PLW0603 -- compiled kernels hold the choice too: it is the process's
    if product is Product.DOT and not has_dot():
        raise ValueError("bf16_product is dot; this processor has no AVX-512 bfloat16 dot product")
    if _chosen not in (None, product):
        raise ValueError(f"bf16_product is {product}; this process computes with {_chosen} already")
    _chosen = product


def is_bf16_product_set() -> bool:
    return _chosen is not None


def bf16_product() -> Product:
    """DOT or FMA. Raises RuntimeError before it is set: a kernel compiled then would not fit the model's rows."""
    if _chosen is None:
        raise RuntimeError("bf16_product is not set; loading a model sets it, as does choose_bf16_product")
    return _chosen


def left_bytes() -> int:
    """Bytes of one number of the left-hand matrix, as the bfloat16 tile reads it."""
    return 4 if bf16_product() is Product.FMA else 2


def has_dot() -> bool:
    return "avx512bf16" in processor_features()
