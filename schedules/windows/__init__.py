"""Convolutions with few input channels on tensor cores: windows of the image, read where they lie in shared memory.

A block brings the patch of the image that its pixels look at into shared memory, pixel after pixel, each with all of
its channels.  The reduction along a kernel row is then a run of neighbouring elements, which starts at another place
for each pixel: fragments of ``mma.sync`` are read straight from the patch, one 32-bit word of a lane at a time, and no
window is ever copied.
"""
