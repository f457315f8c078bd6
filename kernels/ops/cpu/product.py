"""How the register tile multiplies bfloat16, decided once in a process, before the first kernel is compiled.

Processors with AVX-512 bfloat16 differ: some do a dot product of pairs as quickly as a float32 multiplication, with
twice the work in it; on others it takes so long that widening both sides to float32 wins. And many have none at all.
"""

from enum import StrEnum
from functools import cache

from kernels.ops.cpu.features import processor_features


class Product(StrEnum):
    DOT = "dot"
    """vdpbf16ps: pairs of bfloat16, summed in float32"""
    FMA = "fma"
    """float32 multiplications: the right-hand matrix is widened in registers, the left-hand one was before"""
    INT8 = "int8"
    """vpdpbusd: fours of unsigned by signed bytes, summed in int32"""


_FASTER_BY = 1.2
"""What FMA must win by: no known processor is near it, so all processes of a machine decide alike."""

_chosen: Product | None = None


def choose_product(product: Product) -> None:
    """Take this one rather than the quicker, for instance to multiply alike on processors that differ.

    Raises ValueError where the processor lacks it or the process computes with the other one already.
    """
    global _chosen  # noqa: PLW0603 -- compiled kernels hold the choice too: it is the process's
    if product is Product.DOT and not _has_dot():
        raise ValueError("bf16_product is dot; this processor has no AVX-512 bfloat16 dot product")
    if _chosen not in (None, product):
        raise ValueError(f"bf16_product is {product}; this process computes with {_chosen} already")
    _chosen = product


def bf16_product() -> Product:
    """DOT or FMA; the first call may measure, which takes about a tenth of a second."""
    if _chosen is None:
        choose_product(_quicker_product())
    assert _chosen is not None
    return _chosen


def left_bytes() -> int:
    """Of one number of the left-hand matrix, as the bfloat16 tile reads it."""
    return 4 if bf16_product() is Product.FMA else 2


def _has_dot() -> bool:
    return "avx512bf16" in processor_features()


@cache
def _quicker_product() -> Product:
    if not _has_dot():
        return Product.FMA
    from kernels.ops.cpu.product_rates import product_rates  # here, because the tile's module needs this one

    rates = product_rates()
    return Product.FMA if rates[Product.FMA] > _FASTER_BY * rates[Product.DOT] else Product.DOT
