"""Parallel loops of CPU functions on the threads that the process already has.

TVM's code asks for every parallel loop through the pointer ``__TVMBackendParallelLaunch``, which TVM's runtime fills.
A module gets a function ``use_threads(pool)`` that points it at code beside it: `core.threads` calls it with a pool.

The code is LLVM IR, so that no C compiler is needed; TVM's code generator inlines what it imports and emits none of it,
hence the functions in TIR around it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from schedules.core.frames import quick_frames

# The pool is that of `core.threads.Pool`.  Tasks are handed out by a counter: whatever number of threads takes part,
# and however late one of them, all are done.
_CODE = """
%pool = type { ptr, ptr, ptr, ptr, i32, i32 }  ; parallel, threads, nested, limit, most, alone
%group = type { ptr, i32 }                     ; TVMParallelGroupEnv: for barriers, tasks
%job = type { ptr, ptr, i32, i32, i32 }        ; function, its data, tasks, the next one, whether one failed

@schedules_pool = weak_odr global ptr null
@schedules_tvm_launch = weak_odr global ptr null
@__TVMBackendParallelLaunch = external global ptr

declare i32 @schedules_launch(ptr, ptr, i32)
declare i32 @schedules_take_tasks(ptr)

define void @schedules_use_threads(ptr %pool) {
  %old = load ptr, ptr @__TVMBackendParallelLaunch
  %again = icmp eq ptr %old, @schedules_launch
  br i1 %again, label %set, label %keep
keep:
  store ptr %old, ptr @schedules_tvm_launch
  br label %set
set:
  store ptr %pool, ptr @schedules_pool
  store ptr @schedules_launch, ptr @__TVMBackendParallelLaunch
  ret void
}

define void @schedules_tasks(ptr %job) {
  %group = alloca %group
  %function = load ptr, ptr %job
  %data.at = getelementptr %job, ptr %job, i32 0, i32 1
  %data = load ptr, ptr %data.at
  %tasks.at = getelementptr %job, ptr %job, i32 0, i32 2
  %tasks = load i32, ptr %tasks.at
  %next = getelementptr %job, ptr %job, i32 0, i32 3
  store ptr null, ptr %group
  %group.tasks = getelementptr %group, ptr %group, i32 0, i32 1
  store i32 %tasks, ptr %group.tasks
  br label %take
take:
  %task = atomicrmw add ptr %next, i32 1 monotonic
  %there = icmp slt i32 %task, %tasks
  br i1 %there, label %run, label %done
run:
  %status = call i32 %function(i32 %task, ptr %group, ptr %data)
  %right = icmp eq i32 %status, 0
  br i1 %right, label %take, label %wrong
wrong:
  %failed = getelementptr %job, ptr %job, i32 0, i32 4
  store atomic i32 1, ptr %failed monotonic, align 4
  br label %take
done:
  ret void
}

define i32 @schedules_parallel(ptr %function, ptr %data, i32 %asked) {
  %job = alloca %job
  store ptr %function, ptr %job
  %data.at = getelementptr %job, ptr %job, i32 0, i32 1
  store ptr %data, ptr %data.at
  %tasks = getelementptr %job, ptr %job, i32 0, i32 2
  %next = getelementptr %job, ptr %job, i32 0, i32 3
  store i32 0, ptr %next
  %failed = getelementptr %job, ptr %job, i32 0, i32 4
  store i32 0, ptr %failed
  %pool = load ptr, ptr @schedules_pool
  %alone.at = getelementptr %pool, ptr %pool, i32 0, i32 5
  %alone = load i32, ptr %alone.at
  %forked = icmp ne i32 %alone, 0
  br i1 %forked, label %serial, label %find
find:
  %parallel = load ptr, ptr %pool
  %none = icmp eq ptr %parallel, null
  br i1 %none, label %tvm, label %ask
ask:
  %nested.at = getelementptr %pool, ptr %pool, i32 0, i32 2
  %nested = load ptr, ptr %nested.at
  %within = call i32 %nested()
  %inner = icmp ne i32 %within, 0
  br i1 %inner, label %serial, label %count
count:
  %threads.at = getelementptr %pool, ptr %pool, i32 0, i32 1
  %threads = load ptr, ptr %threads.at
  %number = call i32 %threads()
  %several = icmp sgt i32 %number, 1
  br i1 %several, label %team, label %serial
team:
  %given = icmp sgt i32 %asked, 0
  %many = select i1 %given, i32 %asked, i32 %number
  store i32 %many, ptr %tasks
  call void %parallel(ptr @schedules_take_tasks, ptr %job, i32 %number, i32 0)
  br label %end
serial:
  %least = call i32 @llvm.smax.i32(i32 %asked, i32 1)
  store i32 %least, ptr %tasks
  %finished = call i32 @schedules_take_tasks(ptr %job)
  br label %end
end:
  %status = load atomic i32, ptr %failed monotonic, align 4
  ret i32 %status
tvm:
  %limit.at = getelementptr %pool, ptr %pool, i32 0, i32 3
  %limit = load ptr, ptr %limit.at
  %free = icmp eq ptr %limit, null
  br i1 %free, label %launch, label %set
set:
  %most.at = getelementptr %pool, ptr %pool, i32 0, i32 4
  %most = load i32, ptr %most.at
  call void %limit(i32 %most)
  br label %launch
launch:
  %tvm.launch = load ptr, ptr @schedules_tvm_launch
  %result = call i32 %tvm.launch(ptr %function, ptr %data, i32 %asked)
  ret i32 %result
}

declare i32 @llvm.smax.i32(i32, i32)
"""


@lru_cache
def _written() -> tuple[tirx.PrimFunc, tirx.PrimFunc, tirx.PrimFunc]:
    """What hands out tasks, what launches them, and what takes a pool: parsed at the first use, as that takes long."""

    @T.prim_func
    def take_tasks(job: T.handle) -> None:
        T.func_attr({"global_symbol": "schedules_take_tasks", "tirx.noalias": True})
        T.evaluate(T.call_extern("void", "schedules_tasks", job))

    @T.prim_func
    def launch(function: T.handle, data: T.handle, tasks: T.int32) -> T.int32:
        T.func_attr({"global_symbol": "schedules_launch", "tirx.noalias": True})
        assert T.call_extern("int32", "schedules_parallel", function, data, tasks) == 0, (
            "RuntimeError",
            ["a task of a parallel loop failed; is there memory left?"],
        )
        return 0

    @T.prim_func
    def use_threads(pool: T.handle) -> None:
        T.func_attr({"global_symbol": "use_threads", "tirx.noalias": True})
        T.evaluate(T.call_extern("void", "schedules_use_threads", pool))

    return take_tasks, launch, use_threads


def on_shared_threads(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod`, a module of lowered CPU functions, with ``use_threads`` if it has parallel loops."""
    loops = [0]

    def count(loop: Any) -> None:
        loops[0] += loop.kind == tirx.ForKind.PARALLEL

    for function in mod.functions.values():
        tvm_ffi.structural_walk(function.body, (tirx.For, count))
    if not loops[0]:
        return mod
    target = next(iter(mod.functions.values())).attrs["target"]
    return tvm.IRModule({**mod.functions, **_functions(target)}, attrs=mod.attrs)


@lru_cache
def _functions(target: tvm.target.Target) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
    with quick_frames():
        take_tasks, launch, use_threads = _written()
    own = {"schedules_launch": launch, "schedules_take_tasks": take_tasks}
    code = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", tvm.ir.StringImm(_CODE), use_threads.body)
    use = use_threads.with_body(code).with_attr("target", tvm.target.Target(target, host=target))
    packed = tirx.transform.MakePackedAPI()(tvm.IRModule({"use_threads": use}))
    return {
        **packed.functions,
        **{tvm.ir.GlobalVar(name): function.with_attr("target", target) for name, function in own.items()},
    }
