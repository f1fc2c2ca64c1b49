"""Boxes of pixels: each output pixel lies in one tile, and in one part of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from schedules.hopper.pixels import PixelTiles, highest, most_images, pixel_tiles, squarest
from tests.conftest import problem_of


def numbers(pixel: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in pixel)


@pytest.mark.parametrize("images_first", [False, True])
@pytest.mark.parametrize("lines_outside", [False, True])
@pytest.mark.parametrize("box", [(1, 4, 4), (2, 2, 8), (4, 1, 2), (1, 1, 8)])
def test_every_pixel_is_one_row_of_one_tile(box: tuple[int, int, int], lines_outside: bool, images_first: bool) -> None:
    from tvm.script import tirx as T

    problem = problem_of("conv2d_nhwc", n=3, h=7, w=9, ci=8, co=8, kh=3, kw=3, pad=1, dtype="float16")
    tiles = PixelTiles(problem, box, lines_outside, images_first)
    rows, covered = box[0] * box[1] * box[2], Counter[tuple[int, ...]]()
    for tile in range(tiles.count):
        start = tiles.start(T.int32(tile))
        covered.update(numbers(tiles.pixel(start, T.int32(row))) for row in range(rows))
        for parts in (parts for parts in (1, 2, 4) if tiles.has_parts(parts)):
            for row in range(rows):
                first = tiles.of_part(start, row // (rows // parts), parts)
                inside = tiles.pixel(first, T.int32(row % (rows // parts)))
                assert numbers(inside) == numbers(tiles.pixel(start, T.int32(row)))
    assert max(covered.values()) == 1
    assert set(covered) >= {(n, y, x) for n in range(3) for y in range(7) for x in range(9)}


def test_boxes_waste_little_and_serve_their_purpose() -> None:
    problem = problem_of("conv2d_nhwc", n=64, h=14, w=14, ci=8, co=8, kh=3, kw=3, pad=1, dtype="float16")

    def box(**words: Any) -> tuple[int, int, int]:
        tiles = pixel_tiles(problem, 128, (1, 2), **words)
        assert tiles
        return tiles.box

    assert box(prefer=most_images)[0] == 64
    for prefer in (squarest, highest, most_images):
        assert pixel_tiles(problem, 128, (1, 2), prefer=prefer).count == 64 * 14 * 14 // 128  # type: ignore[union-attr]
    assert box(width=4)[2] == 4
