"""Winograd's convolution: how the image is cut, and the schedules of all layouts, on GPUs and on the CPU."""
