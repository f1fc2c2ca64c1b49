"""Parallel loops on a pool that stands in for OpenMP: Python's threads, so that what is asked of it is seen."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from schedules.build.builder import compiled
from schedules.core.arch import parse_arch
from schedules.core.threads import Pool, pool

ROWS = 37


@T.prim_func(s_tir=True)
def increment(a: T.Buffer((ROWS,), "float32"), most: T.int32) -> None:
    for i in T.parallel(ROWS):
        assert i < most, "too far"
        a[i] = a[i] + T.float32(1)


@T.prim_func(s_tir=True)
def once(a: T.Buffer((ROWS,), "float32")) -> None:
    for i in T.parallel(1):  # a single task
        a[i] = T.float32(1)


class Team:
    """An OpenMP library with teams of `size` threads whatever it is asked for; keeps what it was asked for."""

    def __init__(self, threads: int, size: int, nested: bool = False) -> None:
        self.asked: list[int] = []
        task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

        def parallel(function: int, job: int, number: int, _flags: int) -> None:
            self.asked.append(number)
            runners = [threading.Thread(target=task(function), args=(job,)) for _ in range(size)]
            for runner in runners:
                runner.start()
            for runner in runners:
                runner.join()

        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        answer = ctypes.CFUNCTYPE(ctypes.c_int32)
        self._held = kind(parallel), answer(lambda: threads), answer(lambda: nested)
        self.pool = Pool(*(ctypes.cast(each, ctypes.c_void_p).value for each in self._held), None, 0, 0)


@pytest.fixture(scope="module")
def module() -> Any:
    return compiled(tvm.IRModule({"main": increment.with_attr("global_symbol", "main")}), parse_arch("llvm"))


@pytest.fixture
def used(module: Any) -> Iterator[Any]:
    """What puts the module on a team's threads, until the test is over."""

    def use(team: Team) -> Any:
        module["use_threads"](ctypes.c_void_p(ctypes.addressof(team.pool)))
        return module["main"]

    yield use
    module["use_threads"](ctypes.c_void_p(ctypes.addressof(pool())))


@pytest.mark.parametrize(("threads", "size"), [(2, 2), (3, 1), (2, 5), (ROWS + 3, 4)])
def test_every_element_is_computed_once_by_teams_of_any_size(used: Any, threads: int, size: int) -> None:
    team = Team(threads, size)
    a = np.arange(ROWS, dtype="float32")
    main = used(team)
    for _ in range(3):
        main(a, ROWS)
    assert (a == np.arange(ROWS) + 3).all() and team.asked == [threads] * 3


@pytest.mark.parametrize("alone", ["one thread", "nested", "forked"])
def test_a_single_thread_asks_for_no_team(used: Any, alone: str) -> None:
    team = Team(1 if alone == "one thread" else 4, 4, nested=alone == "nested")
    team.pool.alone = alone == "forked"
    a = np.zeros(ROWS, "float32")
    used(team)(a, ROWS)
    assert (a == 1).all() and not team.asked


def test_a_pool_is_read_at_every_call(used: Any) -> None:
    team, other = Team(2, 2), Team(3, 3)
    main, a = used(team), np.zeros(ROWS, "float32")
    main(a, ROWS)
    team.pool.parallel, team.pool.threads = other.pool.parallel, other.pool.threads
    main(a, ROWS)
    used(other)(a, ROWS)
    assert (a == 3).all() and (team.asked, other.asked) == ([2], [3, 3])


@pytest.mark.parametrize("threads", [1, 4])
def test_a_task_that_fails_fails_the_call(used: Any, threads: int) -> None:
    with pytest.raises(RuntimeError, match="a task of a parallel loop failed"):
        used(Team(threads, threads))(np.zeros(ROWS, "float32"), ROWS - 1)


def test_without_a_pool_tvm_has_threads(used: Any) -> None:
    a, none = np.zeros(ROWS, "float32"), Team(1, 1)
    none.pool.parallel = None
    used(none)(a, ROWS)
    assert (a == 1).all()


def test_a_function_without_parallel_loops_is_left_as_it_is() -> None:
    serial = compiled(tvm.IRModule({"main": once.with_attr("global_symbol", "main")}), parse_arch("llvm"))
    assert not serial.implements_function("use_threads")
