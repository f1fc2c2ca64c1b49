"""The launch of CUDA kernels as machine code, which does what `bundle.package.launch` else does in Python.

A library with one function of TVM's FFI, `launch(job, stream, *words)`.  A job (`bundle.package.launch`) lists the
kernels and what each of their parameters is: one of the words, which are addresses of tensors, or what one of them
points at, a tensor map.  It returns 0, or what kept it from launching: the driver's error, -1 for an address that is no
multiple of 16, -2 where another context is the thread's.

The code is LLVM IR, so that no C compiler is needed; TVM's code generator inlines what it imports and emits none of it,
hence the function in TIR around it.
"""

from __future__ import annotations

import re
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

# Nothing is written but on the stack: any number of threads may launch at once.  A field is what lies at the address of
# a getelementptr; `_code` writes both.
_CODE = """
%any = type { i32, i32, i64 }                        ; TVMFFIAny: type, padding, value
%job = type { ptr, ptr, ptr, i64, i64, ptr }         ; launch, ask for the context, context, addresses, kernels, these
%kernel = type { ptr, ptr, i64, ptr }                ; CUlaunchConfig, function, parameters, these
%parameter = type { i64, i64 }                       ; kind, what it is of

define i64 @schedules_run(ptr %args) {
  %here = alloca ptr
  %config = alloca [56 x i8], align 8
  %passed = alloca [64 x ptr]
  %job = field ptr, %any, ptr %args, i64 0, i32 2
  %stream = field ptr, %any, ptr %args, i64 1, i32 2
  %words = getelementptr %any, ptr %args, i64 2, i32 2
  %addresses = field i64, %job, ptr %job, i32 0, i32 3
  br label %aligned
aligned:
  %word.at = phi i64 [ 0, %0 ], [ %word.next, %word ]
  %bits = phi i64 [ 0, %0 ], [ %bits.next, %word ]
  %all = icmp eq i64 %word.at, %addresses
  br i1 %all, label %tested, label %word
word:
  %word.value = field i64, %any, ptr %words, i64 %word.at
  %bits.next = or i64 %bits, %word.value
  %word.next = add i64 %word.at, 1
  br label %aligned
tested:
  %low = and i64 %bits, 15
  %odd = icmp ne i64 %low, 0
  br i1 %odd, label %refused, label %where
refused:
  ret i64 -1
where:
  store ptr null, ptr %here
  %ask = field ptr, %job, ptr %job, i32 0, i32 1
  %asked = call i32 %ask(ptr %here)
  %context = field ptr, %job, ptr %job, i32 0, i32 2
  %current = load ptr, ptr %here
  %same = icmp eq ptr %current, %context
  br i1 %same, label %begin, label %elsewhere
elsewhere:
  ret i64 -2
begin:
  %launch = load ptr, ptr %job
  %count = field i64, %job, ptr %job, i32 0, i32 4
  %kernels = field ptr, %job, ptr %job, i32 0, i32 5
  br label %next
next:
  %number = phi i64 [ 0, %begin ], [ %number.next, %launched ]
  %done = icmp eq i64 %number, %count
  br i1 %done, label %over, label %one
over:
  ret i64 0
one:
  %kernel = getelementptr %kernel, ptr %kernels, i64 %number
  %as = load ptr, ptr %kernel
  call void @llvm.memcpy.p0.p0.i64(ptr align 8 %config, ptr align 8 %as, i64 56, i1 false)
  %config.stream = getelementptr i8, ptr %config, i64 32
  store ptr %stream, ptr %config.stream
  %function = field ptr, %kernel, ptr %kernel, i32 0, i32 1
  %parameters = field i64, %kernel, ptr %kernel, i32 0, i32 2
  %list = field ptr, %kernel, ptr %kernel, i32 0, i32 3
  br label %fill
fill:
  %place = phi i64 [ 0, %one ], [ %place.next, %filled ]
  %full = icmp eq i64 %place, %parameters
  br i1 %full, label %go, label %parameter
parameter:
  %kind = field i64, %parameter, ptr %list, i64 %place
  %of = field i64, %parameter, ptr %list, i64 %place, i32 1
  %slot = getelementptr [64 x ptr], ptr %passed, i64 0, i64 %place
  switch i64 %kind, label %constant [ i64 0, label %address
                                      i64 1, label %map ]
address:
  %address.at = getelementptr %any, ptr %words, i64 %of
  store ptr %address.at, ptr %slot
  br label %filled
map:
  %map.ptr = field ptr, %any, ptr %words, i64 %of
  store ptr %map.ptr, ptr %slot
  br label %filled
constant:
  %constant.ptr = inttoptr i64 %of to ptr
  store ptr %constant.ptr, ptr %slot
  br label %filled
filled:
  %place.next = add i64 %place, 1
  br label %fill
go:
  %code = call i32 %launch(ptr %config, ptr %function, ptr %passed, ptr null)
  %right = icmp eq i32 %code, 0
  br i1 %right, label %launched, label %wrong
launched:
  %number.next = add i64 %number, 1
  br label %next
wrong:
  %wide = zext i32 %code to i64
  ret i64 %wide
}

define void @schedules_launch(ptr %args, ptr %result) {
  %code = call i64 @schedules_run(ptr %args)
  store i32 1, ptr %result
  %value = getelementptr %any, ptr %result, i32 0, i32 2
  store i64 %code, ptr %value
  ret void
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
"""


def _code() -> str:
    """LLVM IR."""
    return re.sub(r"(%[\w.]+) = field (\w+), (.+)", r"\1.at = getelementptr \3\n  \1 = load \2, ptr \1.at", _CODE)


def build_launch() -> Any:
    """The module with the function, built for this CPU."""

    @T.prim_func
    def launch(function: T.handle, args: T.handle, count: T.int32, result: T.handle) -> T.int32:
        T.func_attr({"global_symbol": "__tvm_ffi_launch", "tirx.noalias": True})
        T.evaluate(T.call_extern("void", "schedules_launch", args, result))
        return 0

    target = tvm.target.Target("llvm")
    code = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", tvm.ir.StringImm(_code()), launch.body)
    mod = tvm.IRModule({"__tvm_ffi_launch": launch.with_body(code).with_attr("target", target)})
    return tvm.get_global_func("target.build.llvm")(mod, target)
