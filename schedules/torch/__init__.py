"""The operators for PyTorch: functions of its tensors, on the CPU and on CUDA GPUs.

    import schedules.torch as kernels

    y = kernels.softmax(x)                                    # forward and backward, any shape
    y = kernels.dropout_softmax(x, 0.1, scale=0.125, mask=m)  # scale, mask, softmax and dropout in one kernel
    loss = kernels.cross_entropy(logits, target)              # one read of the logits; backward one more, and one write
    y = kernels.conv2d(x, weight, bias, padding=1, activation="relu")  # forward only

Each is a custom operator of PyTorch (``torch.ops.schedules``): autograd, ``torch.compile`` without graph breaks, fake
tensors and CUDA graphs work.  The first call of a shape chooses and builds its kernel as `schedules.load` does, or
takes it from the bundles named by `use_bundles`; make that call before a CUDA graph is captured.  What was built is
kept on disk for the processes that come after, and `prepare` builds many at once.

Every function raises ArgumentError for tensors that it does not take, and what `schedules.load` raises for shapes that
cannot be meant or built.
"""

from schedules.torch.convolution import conv2d, conv2d_hwcn, conv2d_nchw, conv2d_nchw32, conv2d_nhwc, depthwise_nchw32
from schedules.torch.kernels import prepare, use_bundles
from schedules.torch.losses import cross_entropy, cross_entropy_with_grad
from schedules.torch.network import Report, backend, optimize, problems
from schedules.torch.packed import pack_nchw32, pool2d_nchw32, unpack_nchw32
from schedules.torch.quantize import quantize
from schedules.torch.softmax import dropout_softmax, log_softmax, softmax, softmax_
from schedules.torch.work import export, plan, tune

__all__ = [
    "Report",
    "backend",
    "conv2d",
    "conv2d_hwcn",
    "conv2d_nchw",
    "conv2d_nchw32",
    "conv2d_nhwc",
    "depthwise_nchw32",
    "cross_entropy",
    "cross_entropy_with_grad",
    "dropout_softmax",
    "export",
    "log_softmax",
    "optimize",
    "pack_nchw32",
    "plan",
    "pool2d_nchw32",
    "prepare",
    "problems",
    "quantize",
    "softmax",
    "softmax_",
    "tune",
    "unpack_nchw32",
    "use_bundles",
]
