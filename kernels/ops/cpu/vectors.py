"""Pieces that emit LLVM instructions over 16 float32 lanes, for the intrinsics of the CPU kernels.

Emitted instructions carry no fast-math flags, so their rounding does not depend on the function around them.
NaN passes through all of them.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from kernels.ops.cpu.features import processor_features
from kernels.ops.cpu.intrinsics import F32, I8, I16, I32, I64

LANES = 16
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_POWERS = {
    5: (1.0, 0.69312418, 0.24024099, 0.0559064, 0.00958283),
    6: (1.0, 0.693147, 0.24022242, 0.05550734, 0.00967151, 0.00132647),
}
"""2^f on [-1/2, 1/2] by number of terms: relative error 3e-6 and 1e-7 at most, exact at 0."""
_NEAREST = 0x08
"""Rounding control of vreduceps: to nearest even, no fraction bits kept, no exceptions."""


class BFloat(ir.Type):  # type: ignore[misc]
    """llvmlite has no name for LLVM's bfloat."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def number(value: int) -> Any:
    return ir.Constant(I64, value)


def splat(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def spread(builder: Any, scalar: Any, vector: Any) -> Any:
    """A value of type `vector` with the scalar in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def element(builder: Any, base: Any, index: Any, size: int = 4) -> Any:
    """The address of an array's element; elements have `size` bytes."""
    return builder.add(base, builder.mul(index, number(size)))


def load(builder: Any, address: Any, kind: Any = FLOATS, align: int = 64) -> Any:
    return builder.load(pointer(builder, address, kind), align=align)


def store(builder: Any, value: Any, address: Any, align: int = 64) -> None:
    builder.store(value, pointer(builder, address, value.type), align=align)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.v16f32" if a.type == FLOATS else "llvm.fma.f32"
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(a.type, [a.type] * 3))
    return builder.call(function, [a, b, c])


def larger(builder: Any, challenger: Any, best: Any) -> Any:
    """The larger of the two; `best` if `challenger` is NaN."""
    return builder.select(builder.fcmp_ordered(">", challenger, best), challenger, best)


def across(builder: Any, lanes: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine all lanes into one scalar, halving them each time."""
    width = LANES // 2
    while width:
        order = [(lane + width) % LANES for lane in range(LANES)]
        turned = builder.shuffle_vector(
            lanes, ir.Constant(lanes.type, ir.Undefined), ir.Constant(INTS, order)
        )
        lanes = combine(builder, turned, lanes)
        width //= 2
    return builder.extract_element(lanes, ir.Constant(I32, 0))


def exp2(builder: Any, x: Any, terms: int = 5) -> Any:
    """2^x for FLOATS, 0 for minus infinity; `terms` as in _POWERS."""
    reduce = builder.module.declare_intrinsic(
        "llvm.x86.avx512.mask.reduce.ps.512", (), ir.FunctionType(FLOATS, [FLOATS, I32, FLOATS, I16, I32])
    )
    scale = builder.module.declare_intrinsic(
        "llvm.x86.avx512.mask.scalef.ps.512", (), ir.FunctionType(FLOATS, [FLOATS, FLOATS, FLOATS, I16, I32])
    )
    undefined, all_lanes, no_rounding = (
        ir.Constant(FLOATS, ir.Undefined),
        ir.Constant(I16, -1),
        ir.Constant(I32, 4),
    )
    fraction = builder.call(reduce, [x, ir.Constant(I32, _NEAREST), undefined, all_lanes, no_rounding])
    *lower, highest = _POWERS[terms]
    power = splat(highest)
    for coefficient in reversed(lower):
        power = fma(builder, power, fraction, splat(coefficient))
    # scalef multiplies by 2^floor of its second operand: x - fraction is whole already.
    return builder.call(scale, [power, builder.fsub(x, fraction), undefined, all_lanes, no_rounding])


def to_bf16(builder: Any, lanes: Any) -> Any:
    """The lanes as 16 bfloat16 in 256 bits, rounded to nearest even."""
    if "avx512bf16" not in processor_features():
        return builder.trunc(rounded_bits(builder, lanes), ir.VectorType(I16, LANES))
    half = ir.VectorType(BFloat(), LANES)
    function = builder.module.declare_intrinsic(
        "llvm.x86.avx512bf16.cvtneps2bf16.512", (), ir.FunctionType(half, [FLOATS])
    )
    return builder.bitcast(builder.call(function, [lanes]), ir.VectorType(I16, LANES))


def rounded_bits(builder: Any, values: Any) -> Any:
    """Bits of float32 (one or FLOATS) rounded to bfloat16, in the lower half of as many int32. A NaN stays one."""
    whole = I32 if values.type == F32 else INTS

    def constant(value: int) -> Any:
        return ir.Constant(whole, value if whole == I32 else [value] * LANES)

    bits = builder.bitcast(values, whole)
    high = builder.lshr(bits, constant(16))
    # Half a unit of the last place that stays; a tie goes up only from an odd one.
    half = builder.add(builder.and_(high, constant(1)), constant(0x7FFF))
    rounded = builder.lshr(builder.add(bits, half), constant(16))
    quiet = builder.or_(high, constant(0x40))
    return builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)


def counted_loop(
    builder: Any, count: Any, start: list[Any], body: Callable[[Any, list[Any]], list[Any]], step: int = 1
) -> list[Any]:
    """values = body(index, values) for index 0, step, … below `count`, which is positive. Leaves the builder after."""
    before = builder.block
    loop = builder.function.append_basic_block("loop")
    after = builder.function.append_basic_block("loop_end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    values = [builder.phi(value.type) for value in start]
    results = body(index, values)
    following = builder.add(index, number(step))
    end = builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    index.add_incoming(number(0), before)
    index.add_incoming(following, end)
    for value, first, result in zip(values, start, results, strict=True):
        value.add_incoming(first, before)
        value.add_incoming(result, end)
    builder.position_at_end(after)
    return results


def prefetch_line(builder: Any, address: Any) -> None:
    """Start loading the cache line at `address`, which need not be valid."""
    byte = I8.as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    )
    read, keep_in_l2, data = ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1)
    builder.call(function, [builder.inttoptr(address, byte), read, keep_in_l2, data])
