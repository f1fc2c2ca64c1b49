; A barrier of a work-group that orders accesses to LDS, and to LDS alone: loads from global memory stay on their way.
; Waves wait for their stores before it.  LDS has no caches, so that after it nothing but the compiler's order counts.
; Source: LLVM's "User Guide for AMDGPU Backend", "Memory Model"; "Memory Model Relaxation Annotations".

declare void @llvm.amdgcn.s.barrier()

define available_externally void @schedules_barrier() convergent alwaysinline {
  fence syncscope("workgroup") release, !mmra !0
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("wavefront") acquire, !mmra !0
  ret void
}

; The end of a turn of a loop that is not to be unrolled: what may not be duplicated is not.
declare void @llvm.amdgcn.sched.barrier(i32)

define available_externally void @schedules_turn() alwaysinline {
  call void @llvm.amdgcn.sched.barrier(i32 0) noduplicate
  ret void
}

; Loads of 2, 4, 8 and 16 bytes at an offset in a buffer of so many bytes; zero where they lie beyond it
declare ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1), i16, i64, i32)
declare i16 @llvm.amdgcn.raw.ptr.buffer.load.i16(ptr addrspace(8), i32, i32, i32)

define available_externally i16 @schedules_load_2(ptr addrspace(1) %base, i64 %bytes, i32 %words, i32 %offset) alwaysinline {
  %buffer = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %base, i16 0, i64 %bytes, i32 %words)
  %loaded = call i16 @llvm.amdgcn.raw.ptr.buffer.load.i16(ptr addrspace(8) %buffer, i32 %offset, i32 0, i32 0)
  ret i16 %loaded
}

declare i32 @llvm.amdgcn.raw.ptr.buffer.load.i32(ptr addrspace(8), i32, i32, i32)

define available_externally i32 @schedules_load_4(ptr addrspace(1) %base, i64 %bytes, i32 %words, i32 %offset) alwaysinline {
  %buffer = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %base, i16 0, i64 %bytes, i32 %words)
  %loaded = call i32 @llvm.amdgcn.raw.ptr.buffer.load.i32(ptr addrspace(8) %buffer, i32 %offset, i32 0, i32 0)
  ret i32 %loaded
}

declare <2 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v2i32(ptr addrspace(8), i32, i32, i32)

define available_externally <2 x i32> @schedules_load_8(ptr addrspace(1) %base, i64 %bytes, i32 %words, i32 %offset) alwaysinline {
  %buffer = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %base, i16 0, i64 %bytes, i32 %words)
  %loaded = call <2 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v2i32(ptr addrspace(8) %buffer, i32 %offset, i32 0, i32 0)
  ret <2 x i32> %loaded
}

declare <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8), i32, i32, i32)

define available_externally <4 x i32> @schedules_load_16(ptr addrspace(1) %base, i64 %bytes, i32 %words, i32 %offset) alwaysinline {
  %buffer = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %base, i16 0, i64 %bytes, i32 %words)
  %loaded = call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %buffer, i32 %offset, i32 0, i32 0)
  ret <4 x i32> %loaded
}

; c (16, 16) += a (16, 32) x b (32, 16); TVM 0.27 has no registers of bfloat16 for AMD GPUs
declare <4 x float> @llvm.amdgcn.mfma.f32.16x16x32.bf16(<8 x bfloat>, <8 x bfloat>, <4 x float>, i32, i32, i32)

define available_externally <4 x float> @schedules_mfma_16x16x32_bf16(<8 x i16> %a, <8 x i16> %b, <4 x float> %c) alwaysinline {
  %a.bf16 = bitcast <8 x i16> %a to <8 x bfloat>
  %b.bf16 = bitcast <8 x i16> %b to <8 x bfloat>
  %sums = call <4 x float> @llvm.amdgcn.mfma.f32.16x16x32.bf16(<8 x bfloat> %a.bf16, <8 x bfloat> %b.bf16, <4 x float> %c, i32 0, i32 0, i32 0)
  ret <4 x float> %sums
}

!0 = !{!"amdgpu-as", !"local"}
