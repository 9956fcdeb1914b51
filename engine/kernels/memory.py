# ruff: noqa: ANN401, PLR0917, ARG001 - Numba reads these signatures: arguments are types first and values later
# mypy: disable-error-code="untyped-decorator,import-untyped,no-untyped-call"
"""Words at addresses, counters that threads share, and a call through an address, for compiled code.

Guarantees: reads and writes of values are ordinary ones, which the compiler may widen into vectors; `take` and `seen` are
ordered, so that whoever sees a counter sees what was written before it was raised. Addresses are plain integers; whoever calls
answers for what they point to.
"""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INT, _FLOAT = types.int64, types.float32

PRODUCT_ARGUMENTS: Final = 11  # of a compiled product, see `engine.kernels.driver`


def _at(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """Element `index` behind an address; the address stays a loop's constant, which vectorising needs."""
    return builder.gep(builder.inttoptr(base, kind.as_pointer()), [index])


@intrinsic
def float_at(_typing: Any, base: Any, index: Any) -> Any:
    """float32 `index` behind `base`."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, index = args
        return builder.load(_at(builder, base, index, _F32), align=4)

    return _FLOAT(_INT, _INT), generate


@intrinsic
def put_float(_typing: Any, base: Any, index: Any, value: Any) -> Any:
    """Write float32 `index` behind `base`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, index, value = args
        builder.store(value, _at(builder, base, index, _F32), align=4)
        return context.get_dummy_value()

    return types.void(_INT, _INT, _FLOAT), generate


@intrinsic
def put_byte(_typing: Any, base: Any, index: Any, value: Any) -> Any:
    """Write the low byte of a word `index` bytes behind `base`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, index, value = args
        builder.store(builder.trunc(value, _I8), _at(builder, base, index, _I8), align=1)
        return context.get_dummy_value()

    return types.void(_INT, _INT, _INT), generate


@intrinsic
def word_at(_typing: Any, base: Any, index: Any) -> Any:
    """int64 `index` behind `base`."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, index = args
        return builder.load(_at(builder, base, index, _I64), align=8)

    return _INT(_INT, _INT), generate


@intrinsic
def put_word(_typing: Any, base: Any, index: Any, value: Any) -> Any:
    """Write int64 `index` behind `base`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, index, value = args
        builder.store(value, _at(builder, base, index, _I64), align=8)
        return context.get_dummy_value()

    return types.void(_INT, _INT, _INT), generate


@intrinsic
def take(_typing: Any, address: Any, by: Any) -> Any:
    """Add to an int64 that other threads add to; the value before."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return _INT(_INT, _INT), generate


@intrinsic
def seen(_typing: Any, address: Any) -> Any:
    """An int64 that other threads raise; what they wrote before is there too."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), ordering="acquire", align=8)

    return _INT(_INT), generate


@intrinsic
def call_product(
    _typing: Any,
    code: Any,
    x: Any,
    rows: Any,
    inner: Any,
    weight: Any,
    scales: Any,
    biases: Any,
    shift: Any,
    y: Any,
    width: Any,
    blocks: Any,
    control: Any,
) -> Any:
    """Call a compiled product at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64] * PRODUCT_ARGUMENTS)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return _INT(*[_INT] * (PRODUCT_ARGUMENTS + 1)), generate


@intrinsic
def call_part(_typing: Any, code: Any, part: Any, context: Any, thread: Any, control: Any) -> Any:
    """Call the compiled code of a part of a step at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64] * 4)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return _INT(*[_INT] * 5), generate


def entry(function: Any) -> int:
    """The address at which other compiled code may call a function that was compiled for one signature.

    Raises:
        RuntimeError: The compiler made no such entry.
    """
    overloads = getattr(function, "overloads", {})
    if len(overloads) != 1:
        raise RuntimeError("what is to be called is not compiled for one signature")
    (compiled,) = overloads.values()
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    if not address:
        raise RuntimeError("the compiler made no entry for other compiled code")
    return address
