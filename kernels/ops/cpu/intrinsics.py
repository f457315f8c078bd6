"""Raw memory, bit casts and atomics for the CPU kernels, which work on addresses as C would."""

# ruff: noqa: ARG001 -- Numba fixes the arguments of an intrinsic and of its generator
from typing import Any

from llvmlite import ir

from kernels.ops.cpu.jit import intrinsic, types

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def pointer_to(element: Any) -> Any:
    """A function that turns an address into a pointer to values of a Numba type."""

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
    """Atomically add to an int64 and return its previous value."""

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


@intrinsic
def cycles(typing_context: Any) -> Any:
    """The processor's time-stamp counter."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.readcyclecounter", (), ir.FunctionType(I64, []))
        return builder.call(function, [])

    return types.int64(), generate
