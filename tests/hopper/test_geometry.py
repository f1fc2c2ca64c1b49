"""Tiles, whatever the operator: what a stage gets, and where results go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from schedules.hopper.geometry import Load, Operand
from schedules.hopper.shared import (
    SECTOR,
    BlockStaging,
    LineStaging,
    PlaneStaging,
    RunStaging,
    SlotStaging,
    StripStaging,
    TensorMap,
)
from tests.hopper.conftest import WorkOf, in_numbers
from tests.hopper.works import WORKS


def places(work: Any, tiles: Sequence[int]) -> Iterator[Any]:
    """Of every block of the clusters at `tiles`, each from which results leave."""
    from tvm.script import tirx as T

    for tile, m, n in product(tiles, range(work.config.cluster_m), range(work.config.cluster_n)):
        place = work.place(T.int32(tile), T.int32(m), T.int32(n))
        yield from [place] if work.leaving == 1 else (work.output_at(place, i)[1] for i in range(work.leaving))


def number(value: Any) -> int:
    return int(in_numbers(value))


def filled(operand: Operand, loads: list[Load]) -> np.ndarray:
    """How often each byte of the operand's part of a stage is written."""
    count = np.zeros(operand.nbytes, "int32")
    for load in loads:
        start = number(load.offset)
        assert start % (8 * operand.source.swizzle) == 0  # where the swizzle begins anew
        assert len(load.at) == operand.source.rank
        count[start : start + operand.source.box_bytes] += 1
    return count


@pytest.mark.parametrize("name", WORKS)
def test_loads_fill_a_stage_once(work_of: WorkOf, name: str) -> None:
    work = work_of(*WORKS[name])
    last = [extent - 1 for extent in (*work.kernel, work.chunks)]
    for operand, parts, loads in (
        (work.a, work.config.cluster_n, work.loads_a),
        (work.b, work.config.cluster_m, work.loads_b),
    ):
        if not isinstance(operand.source, TensorMap):
            continue
        tile = operand.tile
        at = np.arange(operand.nbytes) % tile.nbytes
        line, spare_lines = at % tile.slab // tile.swizzle, operand.spare_k if tile.transposed else operand.spare
        spare = line >= tile.slab // tile.swizzle - spare_lines
        for place, where in product(places(work, [0, work.clusters - 1]), ([0, 0, 0], last)):
            boxes = [load for part in range(parts) for load in operand.all_loads(loads(place, *where, part))]
            count = filled(operand, boxes)
            assert (count == ~spare).all() and count.sum() == operand.loaded
            operand.check_loads(loads(place, *where, 0), parts)


def stored_in_boxes(work: Any) -> np.ndarray:
    target, staging = work.output.target, work.output.staging
    count = np.zeros(target.sizes[::-1], "int32")
    for place, part in product(places(work, range(work.clusters)), range(work.config.parts)):
        for column in range(0, staging.columns, staging.width):
            start = [number(at) for at in work.store_at(place, part, column)]
            assert min(start) >= 0
            box = [slice(at, at + extent) for at, extent in zip(start, target.box, strict=True)]
            count[tuple(box[::-1])] += 1
    return count


def stored_in_lines(work: Any) -> np.ndarray:
    target, staging = work.output.target, work.output.staging
    count = np.zeros(target.sizes[::-1], "int32")
    for place, part in product(places(work, range(work.clusters)), range(work.config.parts)):
        for column, row in product(
            range(0, staging.columns, staging.width), range(0, staging.rows, staging.run)
        ):  # fmt: skip
            start = [number(at) for at in work.line_at(place, part, row, column)]
            assert min(start) >= 0
            box = [slice(at, at + extent) for at, extent in zip(start, target.box, strict=True)]
            count[tuple(box[::-1])] += 1
    return count


def stored_in_runs(work: Any) -> np.ndarray:
    target, staging = work.output.target, work.output.staging
    count = np.zeros(target.elements, "int32")
    of_run = target.rows * staging.pitch if staging.packed else staging.width
    for place, part in product(places(work, range(work.clusters)), range(work.config.parts)):
        for column, row in product(
            range(0, staging.columns, staging.width), range(0, staging.rows, target.rows)
        ):  # fmt: skip
            index, inside = map(number, work.run_at(place, part, row, column))
            for element in range(0, min(of_run, inside), target.vector):
                assert (index + element) % target.vector == 0
                count[index + element : index + element + target.vector] += 1
    return count


def stored_in_blocks(work: Any) -> np.ndarray:
    target, staging = work.output.target, work.output.staging
    count = np.zeros(target.elements, "int32")
    for place, part in product(places(work, range(work.clusters)), range(work.config.parts)):
        for block in range(staging.blocks):
            index, inside = map(number, work.run_at(place, part, block, 0))
            stored = max(0, min(staging.rows * staging.run, inside))
            assert index % target.vector == stored % target.vector == 0
            count[index : index + stored] += 1
    return count


def stored_in_columns(work: Any) -> np.ndarray:
    target, staging = work.output.target, work.output.staging
    count = np.zeros(target.elements, "int32")
    for place, part in product(places(work, range(work.clusters)), range(work.config.parts)):
        for row in range(0, staging.rows, 2):
            start, pitch, inside = work.columns_at(place, part, row)
            stored = staging.columns if inside is None else min(staging.columns, number(inside))
            for column in range(stored):
                at = number(start) + column * pitch
                count[at : at + 2] += 1
    return count


def stored_in_slots(work: Any) -> np.ndarray:
    target, staging = work.output.target, work.output.staging
    count = np.zeros(target.elements, "int32")
    for place, part in product(places(work, range(work.clusters)), range(work.config.parts)):
        first, last = map(number, work.slots_at(place, part))
        slots = [tuple(map(number, work.slot_of(place, part, row))) for row in range(staging.rows)]
        # what is stored follows each other, wherever what is not stands between
        assert [at for at, there in slots if there] == list(range(first, last))
        assert target.ragged or first == last or first % target.vector == last % target.vector == 0
        starts = {at: number(work.slot_start(tirx.IntImm("int32", at))) for at in range(first, last)}
        for at, start in starts.items():
            assert start - at % target.vector == starts.get(at - at % target.vector, start - at % target.vector)
        channels = [tuple(map(number, work.column_start(place, part, column))) for column in range(staging.columns)]
        for (channel, inside), start in product(channels, starts.values()):
            if inside:
                count[start + channel] += 1
    return count


def results_of(work: Any, place: Any) -> list[tuple[int, int]]:
    """The image and the result of each row of a tile that is one, in order."""
    rows = product(range(work.config.parts), range(work.output.staging.rows))
    slots = [tuple(map(number, work.plane_slot(place, part, row))) for part, row in rows]
    return [(image, result) for image, result, there in slots if there]


def stored_in_planes(work: Any) -> np.ndarray:
    target, staging = work.output.target, work.output.staging
    count = np.zeros(target.elements, "int32")
    for place in places(work, range(work.clusters)):
        assert results_of(work, place) == list(product(range(staging.images), range(staging.plane)))
        begin, apart, images = work.planes_at(place)
        channels = [tuple(map(number, work.column_start(place, 0, column))) for column in range(staging.columns)]
        for image, (channel, inside) in product(range(min(staging.images, number(images))), channels):
            if inside:
                at = number(begin) + image * apart + channel
                count[at : at + staging.plane] += 1
    return count


def stored_in_strips(work: Any) -> np.ndarray:
    target, staging, sector = work.output.target, work.output.staging, SECTOR // work.output.staging.item
    count = np.zeros(target.elements, "int32")
    for place in places(work, range(work.clusters)):
        start, there, first, following, plane = map(number, work.strip_at(place))
        if not there:  # beyond the last image, where a cluster has more tiles
            continue
        have = results_of(work, place)
        assert have == [(0, result) for result in range(first, first + len(have))]
        for column in range(staging.columns):
            channel, inside = map(number, work.column_start(place, 0, column))
            if not inside or not have:
                continue
            begin, end = start + channel + first, start + channel + following
            begin = begin if first == 0 else -(-begin // sector) * sector
            end = min(-(-end // sector) * sector, start + channel + plane)
            assert (
                begin >= end
                or end <= target.elements
                and end <= start + channel + first + len(have) <= start + channel + plane
            )
            count[begin:end] += 1
    return count


@pytest.mark.parametrize("name", WORKS)
def test_each_result_is_stored_once(work_of: WorkOf, name: str) -> None:
    work = work_of(*WORKS[name])
    output, staging = work.output, work.output.staging
    if isinstance(output.target, TensorMap):
        assert staging.store_bytes == output.target.box_bytes
        count = stored_in_lines(work) if isinstance(staging, LineStaging) else stored_in_boxes(work)
    elif isinstance(staging, RunStaging):
        count = stored_in_runs(work)
    elif isinstance(staging, SlotStaging):
        count = stored_in_slots(work)
    elif isinstance(staging, PlaneStaging):
        count = stored_in_planes(work)
    elif isinstance(staging, StripStaging):
        count = stored_in_strips(work)
    elif isinstance(staging, BlockStaging):
        count = stored_in_blocks(work)
    else:
        count = stored_in_columns(work)
    assert (count == 1).all()


@pytest.mark.parametrize("name", ["a pixel", "a pixel, TF32", "groups, padding skipped"])
def test_taps_left_out_see_padding_only(work_of: WorkOf, name: str) -> None:
    work = work_of(*WORKS[name])
    p = work.problem

    def inside(start: int, extent: int, out: int, tap: int, axis: int) -> bool:
        pixels = (at * p.stride[axis] + tap * p.dilation[axis] - p.pad[axis] for at in range(start, start + extent))
        return any(0 <= pixel < (p.h, p.w)[axis] for pixel in pixels)

    _, h, w = work.tiles.box if hasattr(work, "tiles") else (1, 1, 1)
    left_out = 0
    for place in places(work, range(work.clusters)):
        y, x = place.pixel[1:] if hasattr(place, "pixel") else (place.y, place.x)
        first_ry, last_ry, first_rx, last_rx = map(number, work.taps(place))
        rows = {tap for tap in range(p.kh) if inside(number(y), h, p.out_h, tap, 0)}
        columns = {tap for tap in range(p.kw) if inside(number(x), w, p.out_w, tap, 1)}
        assert rows <= set(range(first_ry, last_ry)) and columns <= set(range(first_rx, last_rx))
        assert last_ry - first_ry == max(1, len(rows)) and last_rx - first_rx == max(1, len(columns))
        left_out += p.kh * p.kw - len(rows) * len(columns)
    assert left_out
