"""Raw memory, bit casts and atomics for the CPU kernels, which work on addresses as C would."""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

from llvmlite import ir

from kernels.ops.cpu.jit import intrinsic, types

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


def pointer_to(element: Any) -> Any:
    """A function from an address to a pointer at values of a Numba type."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(element)))

        return types.CPointer(element)(types.int64), generate

    return pointer


f32 = pointer_to(types.float32)
i64 = pointer_to(types.int64)
i32 = pointer_to(types.int32)
u16 = pointer_to(types.uint16)
u32 = pointer_to(types.uint32)
u8 = pointer_to(types.uint8)


@intrinsic
def bits_of(typing_context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], I32)

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 made of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.uint32), generate


@intrinsic
def fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Atomically add to an int64 and give what was there before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic(
            "llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])
        )
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


def prefetch_line(builder: Any, address: Any) -> None:
    """Emit: start loading the cache line at `address`, which need not be valid."""
    pointer = I8.as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    )
    read, keep_in_l2, data = ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1)
    builder.call(function, [builder.inttoptr(address, pointer), read, keep_in_l2, data])


@intrinsic
def cycles(typing_context: Any) -> Any:
    """The processor's time-stamp counter."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.readcyclecounter", (), ir.FunctionType(I64, []))
        return builder.call(function, [])

    return types.int64(), generate


@intrinsic
def row_max(typing_context: Any, address: Any, count: Any) -> Any:
    """Largest of `count` float32 (a positive multiple of 16, 64-byte aligned); NaN is passed over."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count = arguments
        vector = ir.VectorType(F32, 16)
        largest = builder.module.declare_intrinsic(
            "llvm.maxnum.v16f32", (), ir.FunctionType(vector, [vector] * 2)
        )
        reduce = builder.module.declare_intrinsic(
            "llvm.vector.reduce.fmax.v16f32", (), ir.FunctionType(F32, [vector])
        )
        before = builder.block
        loop = builder.function.append_basic_block("max")
        after = builder.function.append_basic_block("max_end")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, best = builder.phi(I64), builder.phi(vector)
        offset = builder.add(address, builder.shl(index, ir.Constant(I64, 2)))
        lanes = builder.load(builder.inttoptr(offset, vector.as_pointer()), align=64)
        better = builder.call(largest, [best, lanes])
        following = builder.add(index, ir.Constant(I64, 16))
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        index.add_incoming(ir.Constant(I64, 0), before)
        index.add_incoming(following, loop)
        best.add_incoming(ir.Constant(vector, [float("-inf")] * 16), before)
        best.add_incoming(better, loop)
        builder.position_at_end(after)
        return builder.call(reduce, [better])

    return types.float32(types.int64, types.int64), generate
