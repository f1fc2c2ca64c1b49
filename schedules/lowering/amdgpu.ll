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

!0 = !{!"amdgpu-as", !"local"}
