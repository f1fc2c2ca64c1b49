"""Convolutions for Hopper (sm_90a) in the style of CUTLASS's warp-specialised persistent kernels, written in TIRx.

A block is one producer warpgroup, of which one thread issues TMA loads, and `consumers` warpgroups that multiply with
wgmma; what TMA cannot reach, all of the producer's threads copy.  Between them a ring of `num_stages` tiles of the
reduction in shared memory, each with a full and an empty mbarrier.  Blocks of a cluster compute neighbouring tiles and
load what they share once, each a part, by multicast.  With `split_k`, blocks of a cluster take turns at the stages of
one tile, send each other their sums through distributed shared memory, and finish each a slice of its columns.  Each
block computes tile after tile of the grid; while the consumers finish one, the ring fills with the next.  With
`ping_pong` consumers take turns at whole tiles, so that one finishes its tile while the next multiplies (CUTLASS's sm90
"pingpong" kernels).  Where they fit, the filters of a tile may stay in shared memory (`stationary`), and the ring has
pixels only.

Geometry, which emits nothing: what is a tile, and where does it lie
    config    the constants, and what they may be whatever the operator
    shared    tensor maps, and how tiles lie in shared memory for TMA and wgmma
    geometry  what an operator says of its tiles: operands, loads, products, where results go
    cost      how long a kernel takes on a device, about, to compare configs by
    pixels    tiles of output pixels as boxes (n, h, w), for NHWC and NCHW32
    rows      tiles of image rows, whose sums are shifted where loads cannot be, for NCHW
    lines     tiles of any pixels of NCHW data, which threads copy as they lie

Mechanism: who loads, waits and multiplies
    program   the kernel, which puts the parts together
    launch    tensors and their maps, shared memory, a block's place in its cluster
    ring      the stages, and the barriers that say who may use one
    producer  the loads
    consumer  tile after tile: wait, multiply, free, and on to the way out; `Cores`, where Blackwell parts from Hopper
    products  what a consumer multiplies of a stage
    fragments operand a by way of registers: float32 that lies MN-major (TF32), pixels in lines
    instructions  wgmma, and words of two numbers
    exchange  sums from block to block where several share a tile's reduction

The way out
    epilogue  from sums to results
    shifted   the same where a result is a sum of each tap, shifted along its image row
    stores    from registers, by way of shared memory or not, to global memory

tf32      what schedules of float32 in TF32 are, whatever the operator

Sources: CUTLASS's sm90 collectives; PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Tensor Copies".
"""
