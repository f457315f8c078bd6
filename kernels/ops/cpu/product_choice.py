"""Measures which product of bfloat16 is faster on this processor, with the register tile on operands in its caches.

Processors with AVX-512 bfloat16 differ: some compute a dot product of pairs, twice the work, as fast as a float32
multiplication; on others it takes so long that widening both sides to float32 is faster. Many have no dot product.
"""

import ctypes
import time
from collections.abc import Callable

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from kernels.ops.cpu.intrinsics import I64
from kernels.ops.cpu.product import Product, has_dot, is_bf16_product_set, set_bf16_product
from kernels.ops.cpu.tile import HEIGHTS, PANEL, Tile
from kernels.ops.cpu.vectors import FLOATS, counted_loop, number

_FASTER_BY = 1.2
"""How much faster FMA must be. No known processor is near this ratio, so all processes of a machine decide alike."""
_INPUTS = 256
_TURNS, _TILES = 12, 100
"""The best of _TURNS runs counts; each takes some hundred microseconds."""


def choose_bf16_product(name: str = "auto") -> None:
    """Set the product called `name`; auto keeps what is set and otherwise sets the quicker one.

    Raises ValueError where the processor lacks it or the process computes with the other one already.
    """
    if name != "auto":
        set_bf16_product(Product(name))
    elif not is_bf16_product_set():
        set_bf16_product(quicker_product())


def quicker_product() -> Product:
    """Return DOT or FMA, whichever is faster; measuring takes about a tenth of a second."""
    if not has_dot():
        return Product.FMA
    rates = product_rates()
    return Product.FMA if rates[Product.FMA] > _FASTER_BY * rates[Product.DOT] else Product.DOT


def product_rates() -> dict[Product, float]:
    """Measure multiplications per second and core of DOT and FMA in turn; takes about a tenth of a second."""
    runs = {product: _prepare(product) for product in (Product.DOT, Product.FMA)}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(_TURNS):
        for product, run in runs.items():
            started_s = time.perf_counter()
            run()
            best[product] = min(best[product], time.perf_counter() - started_s)
    work = _TILES * HEIGHTS[-1] * PANEL * _INPUTS
    return {product: work / spent_s for product, spent_s in best.items()}


def _prepare(product: Product) -> Callable[[], None]:
    """A function that computes full-size tiles one after the other."""
    rows = HEIGHTS[-1]
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    tile = Tile(builder, rows, PANEL // 16, product)
    a, b, c = function.args
    left_bytes = 4 if product is Product.FMA else 2

    def one_tile(_: object, sums: list[object]) -> list[object]:
        start = dict(zip(tile.cells(), sums, strict=True))
        results = tile.loop(
            a, number(_INPUTS * left_bytes), b, number(PANEL * 4), number(_INPUTS // 2), start
        )
        return list(results.values())

    zero = ir.Constant(FLOATS, [0.0] * 16)
    sums = counted_loop(builder, number(_TILES), [zero] * len(tile.cells()), one_tile)
    tile.store(c, number(PANEL * 4), dict(zip(tile.cells(), sums, strict=True)))
    builder.ret_void()

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(target, llvm.PipelineTuningOptions(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, target)
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(engine.get_function_address("tile"))
    left = torch.zeros(rows, _INPUTS, dtype=torch.float32 if left_bytes == 4 else torch.bfloat16)
    right, out = torch.zeros(_INPUTS // 2, PANEL, dtype=torch.int32), torch.zeros(rows, PANEL)

    def run(keep: object = (engine, left, right, out)) -> None:  # noqa: ARG001 -- used by address
        call(left.data_ptr(), right.data_ptr(), out.data_ptr())

    return run
