"""Problems: one concrete shape of an operator, as a frozen dataclass whose fields are what a person types."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, ClassVar, TypeVar

import numpy as np

from schedules.core.arithmetic import Arithmetic
from schedules.core.draws import Draw, channels, multiple_of, one_of, pair_of, up_to
from schedules.core.epilogue import ACTIVATIONS, RUN_TIME, Activation, Epilogue, Term
from schedules.core.errors import ConfigError, ProblemError
from schedules.core.fields import Fields, Pair, given_names, hints_of

LONGEST = 2**31 - 1  # extent of an axis: what a grid, and a coordinate of TMA, reach
LARGEST = 2**44  # elements of a tensor, what the addresses of 64-bit systems reach with room to spare
SIDES = (7, 10, 12, 14, 20, 28, 36, 40, 56, 60, 80, 112, 150, 224)  # of images in layers, in pixels
MOST = 1000  # of a whole number that is drawn, where the problem does not say
C = TypeVar("C", bound="Conv2dProblem")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a TVM dtype name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a built function, in the order of the call.

    `shape` is the concrete shape for the problem; axis `runtime_axis` may have any other extent at each call, and
    `ranged_axis` one from `least` to the shape's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    output: bool = False
    runtime_axis: int | None = None
    ranged_axis: int | None = None
    least: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Problem(Fields):
    """Base of all problems.  Subclasses check themselves in ``__post_init__`` and raise ProblemError."""

    error = ProblemError
    noun = "problem"
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    finishing: ClassVar[tuple[str, ...]] = ()  # fields that say what is done to a result, however it was computed
    alone: ClassVar[int] = 0  # problems that are alike but for a range that are each built alone, before one is for all

    def bare(self) -> Problem:
        """The problem without what is done to its result: what makes a config fast is mostly the same."""
        plain = {f.name: f.default for f in dataclasses.fields(self) if f.name in self.finishing}
        return dataclasses.replace(self, **plain) if plain else self

    def is_bare_as(self, other: Problem) -> bool:
        """Whether `bare` of both is the same."""
        names = [name for name in self.__dataclass_fields__ if name not in self.finishing]
        return type(self) is type(other) and all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def flops(self) -> int:
        """Floating-point operations of the textbook method; a multiply and an add count as two."""
        raise NotImplementedError

    @property
    def min_bytes(self) -> int:
        """The fewest bytes through device memory: every input read once, every output written once."""
        return sum(argument.nbytes for argument in self.arguments())

    def arguments(self) -> tuple[Argument, ...]:
        """The tensors of the built function, in call order, outputs last."""
        raise NotImplementedError

    def smaller(self) -> Iterator[Problem]:
        """Ever smaller problems of the same kind, for verification where the real one is too large."""
        raise NotImplementedError

    def odd(self) -> Iterator[Problem]:
        """Small problems of the same kind whose extents fit no tile, the oddest first; a config may not take them."""
        raise NotImplementedError

    @classmethod
    def drawn(cls, r: Random, large: bool = False) -> dict[str, Any]:
        """Fields of a random problem, which may be none; those that are not here keep their defaults."""
        return {name: draw(r) for name, draw in cls.draws(large).items()}

    @classmethod
    def draws(cls, large: bool = False) -> dict[str, Draw]:
        """How the fields of random problems are drawn, by name: of problems to verify, or `large` ones, as real layers
        are and larger, only to build.

        A field `x` is drawn from the tuple that the class has as `xs` (``dtype`` from ``dtypes``) or, without one, by
        its type: truth values, whole numbers up to MOST, pairs of small ones.  A class with fields of other types, or
        with extents of its own, adds to this.
        """
        by_type = {bool: one_of(False, True), int: up_to(MOST), Pair: pair_of(one_of(1, 1, 2, 3))}
        draws = {}
        for name in given_names(typing.cast(Any, cls)):
            if isinstance(choices := getattr(cls, f"{name}s", None), tuple):
                draws[name] = one_of(*choices)
            elif (kind := hints_of(typing.cast(Any, cls))[name]) in by_type:
                draws[name] = by_type[kind]
        return draws

    def any_extent(self) -> Problem:
        """The problem that stands for all that differ in run-time extents only; one built function takes them all."""
        return self

    @property
    def run_time(self) -> tuple[str, ...]:
        """Fields of which a built function takes other values at a call: of `x` with an `x_from`, those from it on."""
        return ()

    def widened(self) -> Problem:
        """What to build for this problem, so that the function serves its like too."""
        return self

    def covers(self, other: Problem) -> bool:
        """Whether a function built for this problem takes the tensors of the `other`."""
        return self in (other, other.any_extent())

    def representative(self) -> Problem:
        """The problem of fixed extents that a config is chosen for."""
        return self

    def instances(self) -> tuple[Problem, ...]:
        """Problems of fixed extents to verify one built function with: the ends of what it takes, and between."""
        return (self,)

    @property
    def key(self) -> str:
        """A stable name for files and journals."""
        return str(self).replace(" ", "_").replace("=", "").replace(",", "x").replace(":", "_")

    def require_reach(self, extents: Mapping[str, int], shapes: Iterable[tuple[int, ...]]) -> None:
        """Raise ProblemError for numbers that no index reaches: `extents` by name, or the elements of `shapes`."""
        for name, extent in extents.items():
            if extent > LONGEST:
                raise ProblemError(f"{name}={extent} is more than {LONGEST}, the most along an axis; split the problem")
        for shape in shapes:
            if math.prod(shape) > LARGEST:
                size = " x ".join(map(str, shape))
                raise ProblemError(
                    f"a tensor of {size} elements is more than any memory holds ({LARGEST}); split the problem"
                )

    def require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if min(value) < 1 if isinstance(value, tuple) else value < 1:
                raise ProblemError(f"{name}={value} must be at least 1")

    def require_dtype(self) -> None:
        dtype = getattr(self, "dtype")  # noqa: B009 (a field of the subclass)
        if dtype not in self.dtypes:
            raise ProblemError(f"dtype={dtype} is not one this operator takes; use {' or '.join(self.dtypes)}")


@dataclass(frozen=True)
class Conv2dProblem(Problem):
    """The geometry that every convolution shares; layouts belong to the operators.

    `n` images of `h` x `w` pixels and `ci` channels, `co` filters of `kh` x `kw`; `stride`, `pad` and `dilation` are
    one number or "h,w".  Padding is the same on both sides.  With `n_from`, the built function takes any number of
    images from that to `n` at run time, and its config is chosen for `n`.
    """

    later: ClassVar[tuple[str, ...]] = ("n_from",)

    n: int
    h: int
    w: int
    ci: int
    co: int
    kh: int
    kw: int
    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    dilation: Pair = (1, 1)
    dtype: str = "float32"
    n_from: int = dataclasses.field(default=0, kw_only=True)  # 0: n images only

    # how the tensors lie, by the names that `definitions.implicit` has for axes
    data_axes: ClassVar[tuple[str, ...]]
    output_axes: ClassVar[tuple[str, ...]]

    @property
    def filter_axes(self) -> tuple[str, ...]:
        raise NotImplementedError

    @cached_property
    def extents(self) -> dict[str, int]:
        """Of every axis that a tensor or a stage of a graph may have."""
        names = ("n", "h", "w", "ci", "co", "kh", "kw")
        sizes: dict[str, int] = {name: getattr(self, name) for name in names}
        sizes |= {"y": self.out_h, "x": self.out_w, "pixel": self.pixels, "k": self.ci * self.kh * self.kw}
        return sizes

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.n * self.out_h * self.out_w

    @property
    def channel_axes(self) -> tuple[int, ...]:
        """Those of the output that number its channels, the slowest first."""
        return tuple(number for number, axis in enumerate(self.output_axes) if axis in ("co", "go", "lo"))

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of data, filter and output."""
        lines = (self.data_axes, self.filter_axes, self.output_axes)
        return tuple(tuple(self.extents[axis] for axis in axes) for axes in lines)

    @property
    def epilogue(self) -> Epilogue:
        """What is done to the sums."""
        raise NotImplementedError

    def arguments(self) -> tuple[Argument, ...]:
        """data, filter, the epilogue's operands in order, output."""
        return self._arguments

    @cached_property
    def _arguments(self) -> tuple[Argument, ...]:
        data, weight, output = self.shapes()
        return (
            self._with_images("data", data, self.dtype),
            *((Argument("filter", weight, self.dtype),) if self.filter_axes else ()),
            *(self._operand(operand) for operand in self.epilogue.operands),
            self._with_images("output", output, self.epilogue.out_dtype, output=True),
        )

    def _with_images(self, name: str, shape: tuple[int, ...], dtype: str, output: bool = False) -> Argument:
        """An argument whose first axis are the images, as far as there may be others at run time."""
        if not self.n_from:
            return Argument(name, shape, dtype, output)
        return Argument(name, shape, dtype, output, ranged_axis=0, least=self.n_from)

    def _operand(self, term: Term) -> Argument:
        """An operand of the epilogue: one number, or of the output's shape, a pixel's axes of it, or its channels as
        one axis."""
        output = self.shapes()[2]
        if term.axis in RUN_TIME:
            size = math.prod(output[axis] for axis in self.channel_axes) if term.axis == "channel" else 1
            return Argument(term.name, (size,), term.dtype)
        kept = [size for axis, size in enumerate(output) if term.axis == "element" or axis not in self.channel_axes]
        return self._with_images(term.name, tuple(kept), term.dtype)

    def __post_init__(self) -> None:
        for name in ("stride", "pad", "dilation"):
            value = getattr(self, name)
            if isinstance(value, int):
                object.__setattr__(self, name, (value, value))
        self.require_positive("n", "h", "w", "ci", "co", "kh", "kw", "stride", "dilation")
        if min(self.pad) < 0:
            raise ProblemError(f"pad={self.pad} must not be negative")
        self.require_dtype()
        for axis, size, pad, k, dilation in zip(
            "hw", (self.h, self.w), self.pad, (self.kh, self.kw), self.dilation, strict=True
        ):
            reach = dilation * (k - 1) + 1
            if reach > size + 2 * pad:
                raise ProblemError(
                    f"k{axis}={k} reaches over {reach} pixels but the padded input has {size + 2 * pad}; "
                    f"enlarge {axis} or pad, or use a smaller kernel"
                )
        given = {"stride": max(self.stride), "dilation": max(self.dilation)}
        padded = {"h + 2 * pad": self.h + 2 * self.pad[0], "w + 2 * pad": self.w + 2 * self.pad[1]}
        axes = {"n": self.n, "ci": self.ci, "co": self.co}
        products = {"out_h * out_w": self.out_h * self.out_w, "ci * kh * kw": self.ci * self.kh * self.kw}
        image, kernel = self.h * self.w * self.ci, self.kh * self.kw * self.ci
        tensors = ((self.n, image), (self.co, kernel), (self.pixels, self.co))
        self.require_reach({**given, **padded, **axes, **products}, tensors)
        if self.n_from:
            self._require_range()

    def _require_range(self) -> None:
        """Raise ProblemError unless the images are outside in each tensor, and all their elements have small numbers;
        of a range of one number, make that number."""
        if not 1 <= self.n_from <= self.n:
            raise ProblemError(f"n_from={self.n_from} is not 1 to n={self.n}; leave it out to take n images only")
        if {self.data_axes[0], self.output_axes[0]} != {"n"}:
            raise ProblemError(f"n_from={self.n_from}: images are not the first axis of this layout; leave out n_from")
        if not self._has_small_numbers():
            raise ProblemError(f"n_from={self.n_from}: n={self.n} images are 2 GiB or more; leave out n_from")
        if self.n_from == self.n:
            object.__setattr__(self, "n_from", 0)

    def _has_small_numbers(self) -> bool:
        """Whether 32 bits number the bytes of every tensor, and the elements of tiles beyond its end."""
        return max(map(math.prod, self.shapes())) * max(2, numpy_dtype(self.dtype).itemsize) < 2**31

    def unchecked(self: C, **sizes: Any) -> C:
        """The same with other `sizes`, which may be expressions of TVM; nothing is checked."""
        other = copy.copy(self)
        for name in [name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)]:
            del other.__dict__[name]
        for name, size in sizes.items():
            object.__setattr__(other, name, size)
        return other

    @property
    def run_time(self) -> tuple[str, ...]:
        return ("n",) if self.n_from else ()

    def widened(self) -> Conv2dProblem:
        """The same for every batch from one more than the last power of two to the next."""
        most = 1 << (self.n - 1).bit_length()
        if self.n_from or self.data_axes[0] != "n" or not self.unchecked(n=most)._has_small_numbers():
            return self
        return dataclasses.replace(self, n=most, n_from=most // 2 + 1) if most > 2 else self

    def covers(self, other: Problem) -> bool:
        if not self.n_from or not isinstance(other, type(self)) or other.n_from:
            return self == other
        return self.n_from <= other.n <= self.n and dataclasses.replace(other, n=self.n) == self.representative()

    def representative(self) -> Conv2dProblem:
        return dataclasses.replace(self, n_from=0) if self.n_from else self

    def instances(self) -> tuple[Conv2dProblem, ...]:
        """For the ends of a range, and an odd number between if there is one."""
        if not self.n_from:
            return (self,)
        middle = (self.n_from + self.n) // 2 | 1
        numbers = sorted({self.n_from, min(middle, self.n), self.n})
        return tuple(dataclasses.replace(self, n=n, n_from=0) for n in numbers)

    @classmethod
    def drawn(cls, r: Random, large: bool = False) -> dict[str, Any]:
        """Half of them as layers mostly are: of square images and kernels, and as many pixels out as in at stride 1."""
        found = super().drawn(r, large)
        if r.random() < 0.5:
            (stride, _), k = found.get("stride", (1, 1)), found.get("kh", 1)
            side = r.choice(SIDES) if large else found["h"]
            layer = {"h": side, "w": side, "kw": k, "stride": (stride, stride), "pad": (k // 2, k // 2)}
            layer |= {"dilation": (1, 1)}
            found |= {name: value for name, value in layer.items() if cls.is_given(name)}
        return found

    @classmethod
    def draws(cls, large: bool = False) -> dict[str, Draw]:
        kernel = one_of(1, 1, 2, 3, 3, 4, 5, 7, *((6, 11) if large else ()))
        step, border = one_of(1, 1, 1, 2, 3), one_of(0, 0, 1, 1, 2, 3)
        most = 2048 if large else 300
        draws = {
            **super().draws(large),
            "n": multiple_of(one_of(1, 1, 8, 32), up_to(8 if large else 3)),
            "n_from": one_of(0),
            "h": multiple_of(one_of(1, 1, 7, 8), up_to(128)) if large else up_to(48),
            "w": multiple_of(one_of(1, 1, 8), up_to(128 if large else 40)),
            "ci": channels(most),
            "co": channels(most),
            "kh": kernel,
            "kw": kernel,
            "stride": pair_of(step),
            "pad": pair_of(border),
            "dilation": pair_of(step),
        }
        return {name: draw for name, draw in draws.items() if cls.is_given(name)}

    @property
    def out_h(self) -> int:
        around = 2 * self.pad[0] - self.dilation[0] * (self.kh - 1) - 1
        return (self.h + (around + self.stride[0])) // self.stride[0]  # an expression stays as it is where it can

    @property
    def out_w(self) -> int:
        around = 2 * self.pad[1] - self.dilation[1] * (self.kw - 1) - 1
        return (self.w + (around + self.stride[1])) // self.stride[1]

    def under(self, rows: int, columns: int) -> Pair:
        """Input rows and columns that so many neighbouring output rows and columns look at."""
        down, right = ((k - 1) * gap + 1 for k, gap in zip((self.kh, self.kw), self.dilation, strict=True))
        return (rows - 1) * self.stride[0] + down, (columns - 1) * self.stride[1] + right

    @property
    def pointwise(self) -> bool:
        """Whether every output pixel is an input pixel."""
        return self.kh == self.kw == 1 and self.stride == (1, 1) and self.pad == (0, 0)

    @property
    def flops(self) -> int:
        return 2 * self.n * self.out_h * self.out_w * self.co * self.ci * self.kh * self.kw

    def odd(self) -> Iterator[Conv2dProblem]:
        """Three images of a few pixels more than the kernel reaches over; channels an odd multiple of 1, 2, ... 32."""
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, (self.kh, self.kw), strict=True)]
        h, w = (max(1, r + s + e - 2 * p) for r, s, e, p in zip(reach, self.stride, (5, 3), self.pad, strict=True))

        def multiple(size: int, step: int, most: int) -> int:
            count = max(1, min(size, most) // step)
            return step * (count - 1 + count % 2)

        for step in (1, 2, 4, 8, 16, 32):
            most = {name: max(45 if name == "ci" else 75, 3 * step) for name in ("ci", "co") if self.is_given(name)}
            channels: dict[str, Any] = {
                name: multiple(getattr(self, name), step, limit) for name, limit in most.items()
            }
            with contextlib.suppress(ProblemError):
                yield dataclasses.replace(self, n=3, n_from=min(self.n_from, 1), h=h, w=w, **channels)

    def smaller(self) -> Iterator[Conv2dProblem]:
        """Halve the longest of images, pixels and channels, each no further than a little over one tile of most
        schedules, so that full tiles and edges both remain."""
        floors = {"n": 68, "co": 68, "ci": 20, "h": 3, "w": 3}
        least = {name: size for name, size in floors.items() if self.is_given(name)}
        problem = self
        while True:
            sizes = {name: getattr(problem, name) for name in least}
            shrinkable = [name for name, size in sizes.items() if size > least[name]]
            if not shrinkable:
                return
            name = max(shrinkable, key=lambda name: sizes[name] / least[name])
            floor = least[name]
            if name in "hw":
                axis = "hw".index(name)
                floor = max(floor, problem.dilation[axis] * ((problem.kh, problem.kw)[axis] - 1) + 1)
            size = max(min(floor, sizes[name]), sizes[name] // 2)
            if size == sizes[name]:
                least[name] = size
                continue
            sizes = {name: size}
            if name == "n" and problem.n_from:
                sizes["n_from"] = max(1, problem.n_from * size // problem.n)
            problem = dataclasses.replace(problem, **sizes)
            yield problem


@dataclass(frozen=True)
class FusedConv2dProblem(Conv2dProblem):
    """A convolution in floating point with an optional epilogue: output = activation(conv + bias + residual).

    `bias` adds one number of `dtype` to each output channel, `residual` one to each output element; `activation` is one
    of `core.epilogue`.  Products are summed, and the epilogue computed, in float32 whatever `dtype` is.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    later: ClassVar[tuple[str, ...]] = ("n_from", "residual")
    finishing: ClassVar[tuple[str, ...]] = ("bias", "activation", "residual")

    bias: bool = False
    activation: str = "none"
    residual: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "activation", str(Activation.parse(self.activation)))

    @cached_property
    def epilogue(self) -> Epilogue:
        terms = ((self.bias, "bias", "channel"), (self.residual, "residual", "element"))
        return Epilogue(
            self.dtype,
            tuple(Term(name, axis, self.dtype) for given, name, axis in terms if given),
            activation=Activation.parse(self.activation),
        )


@dataclass(frozen=True)
class Config(Fields):
    """The parameters of a schedule.  `check` alone decides what is legal, for the tuner, the defaults and the CLI."""

    error = ConfigError
    noun = "config"
    most = 2**31 - 1

    @classmethod
    def unfit(cls, problem: Any, arch: Any) -> str | None:
        """Why no config of this class is legal for `problem` on `arch`, whatever its fields; None if one may be."""
        return None

    def check(self, problem: Any, arch: Any) -> str | None:
        """Why this config is illegal for `problem` on `arch`, in words that name the field, or as `unfit` has it; None
        if it is legal."""
        raise NotImplementedError

    def arithmetic_of(self, problem: Any) -> Arithmetic | None:
        """What the results of `problem` are held to, where that depends on the config."""
        return None

    def require(self, problem: Any, arch: Any) -> None:
        """Raise ConfigError if `check` finds a reason."""
        reason = self.check(problem, arch)
        if reason:
            raise ConfigError(f"illegal config: {reason}")
