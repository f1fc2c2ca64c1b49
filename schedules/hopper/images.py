"""Whole images of NCHW data as they lie, for layers whose output images fit into a tile.

A tile is as many whole output images as its rows hold.  What they look at are whole images too: of a chunk of the
channels one contiguous piece of memory, whatever the image's size, so that it comes by a bulk copy without a tensor
map.  It lies in shared memory as in the tensor, and the consumers' threads read pixels from there into the fragments of
operand a (`hopper.fragments`).  Each tap would read its own, which shared memory has not the bandwidth for: kernels are
of 1x1.

Source: PTX ISA, "cp.async.bulk".
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.problem import Conv2dProblem
from schedules.core.tvm import T, tirx
from schedules.hopper.lanes import QuadOrder, quad_order
from schedules.hopper.shared import UNIT, beyond_indices
from schedules.tirx.types import Buffer, Expr, Index, Pointer
from schedules.tirx.values import named, where

ITEM = 2  # bytes
VECTOR = UNIT // ITEM  # elements in the unit of a copy

_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


@dataclass(frozen=True)
class Images:
    """What `images` neighbouring output images of `problem`, of 1x1 without padding, look at in `k` channels of
    `tensor`.

    In shared memory as [image][channel][pixel].
    """

    tensor: str
    problem: Conv2dProblem
    images: int
    k: int

    @property
    def plane(self) -> int:
        """Elements of a channel of an image."""
        return self.problem.h * self.problem.w

    @property
    def outputs(self) -> int:
        """Pixels of an output image."""
        return self.problem.out_h * self.problem.out_w

    @property
    def image(self) -> int:
        """Elements of an image's channels in a stage."""
        return self.k * self.plane

    @property
    def nbytes(self) -> int:
        """Of a stage."""
        return self.nbytes_of(self.k)

    @property
    def loaded(self) -> int:
        """Bytes that come into a stage, about."""
        return self.nbytes

    @property
    def ragged(self) -> bool:
        """Whether the last stage has fewer channels."""
        return self.problem.ci % self.k > 0

    @property
    def paired(self) -> bool:
        """Whether neighbouring pixels of a fragment share an aligned word."""
        return self.problem.stride == (1, 1) and self.plane % 2 == 0

    @property
    def order(self) -> QuadOrder:
        """In which threads read pixels."""
        return quad_order(self.plane, self.paired, self.problem.stride[1], (False, True) if self.paired else (False,))

    def reason(self) -> str | None:
        """Why the tensor cannot be read so; None if it can."""
        p = self.problem
        return why_no_images(p) or beyond_indices(self.tensor, p.n * p.ci * self.plane)

    def left(self, chunk: Expr) -> Index:
        """Channels of a chunk."""
        return named("left", tirx.min(self.problem.ci - chunk * self.k, self.k)) if self.ragged else self.k

    def nbytes_of(self, channels: Index) -> Index:
        """Bytes that come in for so many channels."""
        return channels * (self.images * self.plane * ITEM)

    def load(
        self,
        source: Buffer,
        image: Expr,
        chunk: Expr,
        to: Buffer,
        start: Expr,
        arrived: Pointer | Expr,
        part: tuple[Index, int],
        mask: Expr | None,
    ) -> None:
        """Have a chunk of the channels of the images from number `image` on come to `start` bytes into `to`; of its
        channels part number `part` of so many, for every block that `mask` names.  Beyond the last image that one comes
        again."""
        p, (number, parts) = self.problem, part
        each = self.k // parts
        form = _LOAD + (".multicast::cluster" if mask is not None else "")
        last = [] if mask is None else [mask]
        first = named("first_channel", number * each)
        channels: Index = each
        if self.ragged:
            channels = named("channels", tirx.max(tirx.min(p.ci - chunk * self.k - first, each), 0))
        with T.serial(self.images, unroll=False) as of_tile:
            of_all = named("image", tirx.min(image + of_tile, p.n - 1))
            element = named("element", of_all * (p.ci * self.plane) + (chunk * self.k + first) * self.plane)
            target = to.ptr_to([start + (of_tile * self.image + first * self.plane) * ITEM])
            nbytes = T.Cast("uint32", channels * (self.plane * ITEM))
            with where(channels > 0 if self.ragged and parts > 1 else None):
                T.evaluate(T.ptx[form](target, source.ptr_to([element]), nbytes, arrived, *last))


def why_no_images(problem: Conv2dProblem) -> str | None:
    """Why the data of `problem` cannot be read so, whatever the tile; None if they can."""
    p = problem
    if (p.kh, p.kw, p.pad) != (1, 1, (0, 0)):
        return f"a kernel of {p.kh}x{p.kw}, pad={p.pad} looks at more than a pixel, or beyond the image; give 1x1"
    if problem.ci % VECTOR:
        return f"ci={problem.ci} is not a multiple of {VECTOR}, after which images begin at 16 bytes"
    return None
