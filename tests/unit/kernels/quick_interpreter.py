"""Triton's interpreter with what it repeats for every operation done once: the same numpy calls, in less Python.

Left as they are: every operation on numbers, every check of a shape or type, loads and stores. For the release of Triton
that the development tools pin; another one runs as it is. tests/unit/kernels/test_kernels_triton.py compares bits.
"""

import builtins
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

RELEASE = "3.6."
changes = interpreter._LangPatchScope()  # of the interpreter itself
language = interpreter._LangPatchScope()  # of the language, by the interpreter


def install() -> None:
    """For this process, until `remove`."""
    if triton.__version__.startswith(RELEASE) and not changes._changes:
        patch_language_once()
        share_block_types()
        share_tuple_types()
        take_short_ways()
        skip_idle_checks()


def remove() -> None:
    """Triton's interpreter as it is."""
    language.restore()
    changes.restore()


def patch_language_once() -> None:
    """The language's functions are replaced by the interpreter's at the first launch and stay so.

    A launch replaces and restores some hundred attributes; each call of a function by a kernel does, too, and does not
    restore them.
    """
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    def attribute(owner: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        meaning = semantic.TritonSemantic(builder)
        inner = getattr(member, "__wrapped__", member)  # behind a check that there is a `_semantic`

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = meaning
            return inner(*args, **kwargs)

        scope.set_attr(owner, name, call)

    def once(fn: Callable[..., Any]) -> Any:
        if not language._changes:  # as for a function whose globals name both modules of the language
            language._changes = patch(SimpleNamespace(__globals__={"tl": tl, "core": core}))._changes
        return nothing

    changes.set_attr(interpreter, "_patch_attr", attribute)
    changes.set_attr(interpreter, "_patch_lang", once)


def share_block_types() -> None:
    """A block's type and the constants of a tensor's shape are made once for each element and shape.

    Nothing writes to them.
    """
    make_block, types = core.block_type.__init__, {}
    numpy_type, numpy_types = interpreter._get_np_dtype, {}
    of_scalars = core.constexpr(1), core.tuple([])

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        key = (element_ty.name, getattr(element_ty, "address_space", 0), *sizes)
        found = types.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            self.of_tensors = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in self.shape])
            found = types[key] = dict(self.__dict__)
        self.__dict__.update(found)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_scalars

    def get_numpy_type(dtype: Any) -> Any:
        key = type(dtype), dtype.name
        if key not in numpy_types:
            numpy_types[key] = numpy_type(dtype)
        return numpy_types[key]

    changes.set_attr(core.block_type, "__init__", block)
    changes.set_attr(core.tensor, "__init__", tensor)
    changes.set_attr(interpreter, "_get_np_dtype", get_numpy_type)


def share_tuple_types() -> None:
    """A tuple finds out its type when it is asked for it."""

    def init(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        self.__dict__["asked"] = core.tuple_type(type) if isinstance(type, list | builtins.tuple) else type

    def get(self: Any) -> Any:
        if self.__dict__.get("asked") is None:
            self.__dict__["asked"] = core._type_for_tuple_values(self.values)
        return self.__dict__["asked"]

    def put(self: Any, value: Any) -> None:
        self.__dict__["asked"] = value

    changes.set_attr(core.tuple, "__init__", init)
    changes.set_attr(core.tuple, "type", property(get, put))


def take_short_ways() -> None:
    """Out of functions that mostly have nothing to do."""
    unwrap, equal, broadcast = (
        core._unwrap_if_constexpr,
        core.dtype.__eq__,
        semantic.TritonSemantic.broadcast_impl_value,
    )
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def same(self: Any, other: Any) -> Any:
        return self is other or equal(self, other)

    def shaped_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        one, two = lhs.type, rhs.type
        if one.is_block() and two.is_block():
            alike = one.shape.values == two.shape.values
        else:
            alike = not one.is_block() and not two.is_block()
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    changes.set_attr(core, "_unwrap_if_constexpr", unwrapped)
    changes.set_attr(core.dtype, "__eq__", same)
    changes.set_attr(semantic.TritonSemantic, "broadcast_impl_value", shaped_alike)


def skip_idle_checks() -> None:
    """Sums and products of integers are made in 64 bits, too, for an assertion that is off without `debug`."""
    check = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            check(self, *arguments)

    changes.set_attr(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", sanitize)
