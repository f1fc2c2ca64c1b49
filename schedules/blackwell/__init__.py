"""Convolutions for Blackwell's datacenter GPUs (sm_100a and its like): Hopper's kernels (`schedules.hopper`) whose
tiles are multiplied by tcgen05.

Tiles, tensor maps, the ring, the producer and the way out are Hopper's.  What multiplies is one thread, of the warp
beside the producer's; the sums lie in tensor memory, 128 lanes (rows of a tile) of 512 columns of 32 bits.  Where two
tiles' sums fit, consumers finish one tile while the next is multiplied.  With ``cta_group=2`` two blocks side by side
multiply together: each loads its own rows of operand a and half of the columns of operand b, and has the sums of its
own rows.

    config        what a config may be
    instructions  tcgen05 as functions of CUDA C++, and its descriptors
    cores         tensor memory and its barriers, the multiplier, and the consumers that read sums

These kernels have never run on a GPU: they are verified in the emulator.

Sources: PTX ISA 9, "TensorCore 5th Generation Family Instructions"; CUTLASS's sm100 collectives and DeepGEMM's sm100
kernels, for who waits for whom.
"""
