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

; c (16, 16) += a (16, 32) x b (32, 16); TVM 0.27 has no registers of bfloat16 for AMD GPUs
declare <4 x float> @llvm.amdgcn.mfma.f32.16x16x32.bf16(<8 x bfloat>, <8 x bfloat>, <4 x float>, i32, i32, i32)

define available_externally <4 x float> @schedules_mfma_16x16x32_bf16(<8 x i16> %a, <8 x i16> %b, <4 x float> %c) alwaysinline {
  %a.bf16 = bitcast <8 x i16> %a to <8 x bfloat>
  %b.bf16 = bitcast <8 x i16> %b to <8 x bfloat>
  %sums = call <4 x float> @llvm.amdgcn.mfma.f32.16x16x32.bf16(<8 x bfloat> %a.bf16, <8 x bfloat> %b.bf16, <4 x float> %c, i32 0, i32 0, i32 0)
  ret <4 x float> %sums
}

!0 = !{!"amdgpu-as", !"local"}
