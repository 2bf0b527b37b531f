"""The array primitives that the algorithms are written over, and how to find them.

A backend is looked up by the type of an array, so no framework is imported before the user has
imported it.  NumPy's backend is the reference; another one must agree with it (a test runs all
methods over all backends).

Primitives work on flat arrays, those that go element by element on any.  ``put``, ``add_at`` and
those that say so may modify their first argument and return it.  Callers pass only arrays that they
have made themselves, or that were given to them.

Numbers are those of Python, or scalars, such as norms and largest elements.  In PyTorch these are
tensors, so that nobody waits for a device, and in a graph symbols of float64.

TensorFlow traces: there, arrays are symbols without values.  Bools and floats are symbols too, and
Python must not branch on them.  So the algorithms say ``choose`` instead of ``if``, and ``on_host``
where they leave arrays for bytes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvd_compress.errors import UnsupportedError

Array = Any
HostFunction = Callable[..., Sequence[np.ndarray]]
Output = tuple[str, int | tuple[int, ...] | None]


class Backend(Protocol):
    #: arrays may be symbols
    traces: bool
    #: operations on stacks of small arrays take less time than one after the other
    batches: bool

    def check_gradient(self, x: Array, in_place: bool = False) -> None:
        """Raise ``UnsupportedError`` unless ``x`` is a dense array of floats, into which, with
        ``in_place``, results can be written."""

    def widen(self, x: Array) -> Array:
        """Flat and in a dtype to accumulate in: half precisions become float32."""

    def restore(self, flat: Array, like: Array) -> Array:
        """Shape and dtype of ``like``."""

    def zeros(self, n: int, like: Array) -> Array: ...

    def full_like(self, x: Array, value: float, /) -> Array: ...

    def copy(self, x: Array, /) -> Array: ...

    def size(self, x: Array, /) -> int: ...

    def shape(self, x: Array, /) -> tuple[int, ...]: ...

    def abs(self, x: Array, /) -> Array: ...

    def maximum(self, x: Array, y: Array, /) -> Array: ...

    def norm(self, x: Array) -> float:
        """L2 norm, added up in float64."""

    def sum(self, x: Array) -> float:
        """The sum of all elements, added up in float64; for methods of users."""

    def scale(self, x: Array, factor: float, /) -> Array:
        """``x`` times a number, such as a quotient of norms."""

    def divided(self, x: Array, divisor: Any, /) -> Array:
        """``x / divisor``, a number, rounded once: the bits of NumPy, wherever the array is."""

    def affine(self, x: Array, factor: Any, shift: Any = 0.0) -> Array:
        """``factor x + shift``, of numbers; reuses ``x``."""

    def add_scaled(self, x: Array, y: Array, factor: Any) -> Array:
        """``x + factor y``, of a number; reuses ``x``."""

    def lerp(self, x: Array, y: Array, weight: float) -> Array:
        """``x + weight (y - x)``: a moving average takes in ``y``; reuses ``x``."""

    def lerp_square(self, x: Array, y: Array, weight: float) -> Array:
        """``x + weight (y^2 - x)``; reuses ``x``."""

    def sqrt(self, x: Array, /) -> Array: ...

    def scalar(self, value: float, like: Array) -> Any:
        """A number as :meth:`vector_norm` returns it for ``like``."""

    def vector_norm(self, arrays: Sequence[Array]) -> Any:
        """L2 norm of all arrays together, a scalar: in float32 of half precisions, whose largest
        number it may pass."""

    def max(self, x: Array, /) -> Any:
        """The largest element, a scalar; there must be one."""

    def clip(self, x: Any, low: Any, high: Any, /) -> Any:
        """A scalar, clipped to limits that are both numbers of Python or both scalars."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        """``x`` if ``condition`` else ``y``, of scalars."""

    def put_where(self, x: Array, condition: Array, value: float, /) -> Array:
        """Put a number where an array of bools says; reuses ``x``."""

    def all_finite(self, x: Array) -> bool: ...

    def reshape(self, x: Array, shape: tuple[int, ...], /) -> Array: ...

    def matmul(self, x: Array, y: Array, /) -> Array:
        """The product of two matrices, or of two stacks of them."""

    def transpose(self, x: Array, /) -> Array:
        """The transpose of a matrix, or of each of a stack."""

    def orthonormal_columns(self, x: Array) -> Array:
        """Q of the QR decomposition of a matrix that is no wider than high, or of each of a stack.
        Signs are such that R has no negative diagonal."""

    def concat(self, arrays: list[Array], axis: int = 0, /) -> Array: ...

    def end_to_end(self, arrays: Sequence[Array]) -> Array:
        """Return arrays of any shape as a flat one; one array alone is not copied."""

    def split(self, x: Array, sizes: list[int], /) -> Sequence[Array]:
        """Return parts of these sizes of a flat array; undoes ``concat``."""

    def stack(self, arrays: tuple[Array, ...], /) -> Array:
        """Along a new dimension in front."""

    def unstack(self, x: Array, /) -> Sequence[Array]:
        """Undo ``stack``."""

    def take(self, x: Array, indices: Array, /) -> Array: ...

    def put(self, x: Array, indices: Array, values: Array | float, /) -> Array: ...

    def add_at(self, x: Array, indices: Array, values: Array, /) -> Array:
        """Add at indices that are unique."""

    def cast(self, x: Array, dtype: str, /) -> Array: ...

    def round_to(self, x: Array, wire: str | None, saturate: bool = False) -> Array:
        """Return the values of ``x`` as they arrive when they are sent as ``wire``; dtype of ``x``.
        ``saturate``: what is too large becomes the largest finite value instead of Inf."""

    def dtype(self, x: Array) -> str:
        """A NumPy name: "float32"."""

    def to_bytes(self, x: Array) -> Array:
        """The bytes of all elements as they are in memory (1-D, uint8)."""

    def from_bytes(self, raw: Array, dtype: str, like: Array) -> Array:
        """Undo ``to_bytes``: flat, on the device of ``like``."""

    def choose(self, condition: Any, yes: Callable[[], Any], no: Callable[[], Any], /) -> Any:
        """``yes()`` if ``condition`` else ``no()``: arrays, or equal nests of them."""

    def either(self, condition: Any, yes: Callable[[], Array], no: Callable[[], Array], /) -> Array:
        """The same of one array each, for little work: a graph does both, and has no branches."""

    def on_host(
        self,
        function: HostFunction,
        inputs: Sequence[Any],
        outputs: Sequence[Output],
        like: Array,
    ) -> list[Array]:
        """``function`` of NumPy arrays: of ``inputs``, arrays or plain numbers.

        Args:
            function: returns as many arrays as there are ``outputs``, and has no side effects.
            outputs: (dtype, length) of flat results, length ``None`` if unknown; or (dtype, shape).
            like: an array on whose device the results shall be; bytes (uint8), which are messages,
                may stay in host memory.
        """

    def pack_sizes(self, arrays: Sequence[Array]) -> Array:
        """The number of elements of each array, eight bytes little-endian (1-D, uint8), on the
        device of the arrays."""

    def unpack_sizes(self, table: Array, count: int) -> list[int]:
        """Undo ``pack_sizes``; a table that is too short is filled with zeros."""

    def from_numpy(self, x: np.ndarray, like: Array | None) -> Array:
        """On the device of ``like``, or in host memory; shares the memory where it can."""

    def to_numpy(self, x: Array) -> np.ndarray:
        """Shares the memory where it can."""

    def address(self, x: Array) -> int | None:
        """Return the address of an array that is contiguous in the memory of the host or of a
        device, else ``None``."""

    def loops(self, x: Array) -> str | None:
        """Return the name of the module with the loops of :mod:`hvd_compress.kernels` for
        contiguous arrays in memory where ``x`` is; a symbol stands for its value.

        ``None``: ``x`` is no such array, or there are none.
        """


class EagerBackend(Backend, Protocol):
    """Arrays that have values."""

    def addresses(
        self, arrays: Sequence[Array], sizes: Sequence[int], dtype: str, device: Any
    ) -> list[int] | None:
        """Return the addresses of contiguous arrays of these sizes, all above zero, this dtype and
        this device (``None``: no device).  ``None``: one differs.

        An array may be given other memory at any time, so nobody keeps the result.
        """

    def flat_on_host(self, arrays: Sequence[Array]) -> list[np.ndarray]:
        """Return contiguous arrays in host memory as flat arrays of NumPy, which keep the memory
        that they have now."""

    def write_into(self, out: Sequence[Array], x: Array, divisor: float = 1.0) -> None:
        """Write the flat ``x``, divided by a number, into contiguous arrays, which it spans end to
        end.  They have its dtype, or a wider one, in which it is divided then."""

    def kth_largest(self, x: Array, k: int) -> Array:
        """The k-th largest value (k from 1) along the last axis: of a flat array a scalar, of a
        matrix one for each row.  NaN counts as larger than everything."""

    def nonzero(self, mask: Array, /) -> Array:
        """Ascending indices, int64."""

    def sort(self, x: Array, /) -> Array: ...


class TracingBackend(Backend, Protocol):
    """Arrays that may be symbols, whose numbers of elements must be known beforehand."""

    def top_k(self, x: Array, k: int) -> Array:
        """Ascending indices of the k largest elements, of equal ones the first; int64."""


_MODULES = {
    "numpy": "hvd_compress.backends.numpy",
    "torch": "hvd_compress.torch.backend",
    "tensorflow": "hvd_compress.tensorflow.backend",
}


def backend_of(x: Array) -> Any:
    """The backend module for an array (a module that has the functions of :class:`Backend`)."""
    return _backend_of_class(type(x))  # type: ignore[arg-type]


@functools.cache
def _backend_of_class(cls: type) -> Any:
    return importlib.import_module(_MODULES[library_of(cls)])


def library_of(cls: type) -> str:
    """Return the library that a class of arrays comes from: "numpy", "torch" or "tensorflow".

    Raises:
        UnsupportedError: it comes from another one.
    """
    for parent in cls.__mro__:  # parameters and the like are subclasses of tensors
        library = parent.__module__.partition(".")[0]
        if library in _MODULES:
            return library
    raise UnsupportedError(
        f"no array backend for {cls.__module__}.{cls.__qualname__}; "
        f"pass an array of {' or '.join(_MODULES)}"
    )
