"""Softmax by PyTorch, torch.compile, cuDNN and Triton, and the device copies that bound them.

Every peer of `PEERS` takes a problem and its tensors by argument name (PyTorch tensors on the GPU, shapes and dtypes of
``problem.arguments()``) and returns a call on the default stream.  float16, bfloat16 and float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from benchmarks.peers import cudnn
from benchmarks.peers.comparison import Call
from schedules.core.errors import ToolchainError, UsageError
from schedules.operators.softmax.definition import SoftmaxProblem

Tensors = Mapping[str, Any]
Peer = Callable[[SoftmaxProblem, Tensors], Call]

_ACCURATE, _LOG = 1, 2  # cudnnSoftmaxAlgorithm_t
_INSTANCE = 0  # cudnnSoftmaxMode_t: over all of an image, here a row
_CUDNN_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 9}  # cudnnDataType_t


def is_plain(problem: SoftmaxProblem) -> bool:
    """Whether nothing is fused: no scale, mask or dropout."""
    return problem.scale == 1 and problem.mask == "none" and not problem.has_dropout


def _require_plain_loss(problem: SoftmaxProblem, name: str) -> None:
    if problem.temperature or problem.smoothing or problem.z:
        raise UsageError(f"{name} has no temperature, smoothing or z")


def _of(problem: SoftmaxProblem, tensors: Tensors, output: bool) -> dict[str, Any]:
    return {a.name: tensors[a.name] for a in problem.arguments() if a.output == output}


def _require_plain(problem: SoftmaxProblem, name: str) -> None:
    if not is_plain(problem):
        raise UsageError(f"{name} fuses no scale, mask or dropout")


def composition(problem: SoftmaxProblem) -> Callable[..., tuple[Any, ...]]:
    """The problem as PyTorch's operations on its inputs by name, each rounding to the tensors' dtype.

    Gradients are PyTorch's own kernels; dropout takes the given zeros and ones.
    """
    torch = cudnn.torch_module()
    if problem.is_drawn:
        raise UsageError("PyTorch draws other elements than the kernel; take drop=given")
    p, aten = problem, torch.ops.aten
    if p.is_loss:
        return _loss(p)
    inverse = 1 / p.keep

    def forward(x: Any, mask: Any = None, drop: Any = None) -> tuple[Any, ...]:
        v = x if p.scale == 1 else x * p.scale
        v = v if mask is None else v + mask
        y = torch.log_softmax(v, -1) if p.is_log else torch.softmax(v, -1)
        return (y,) if drop is None else (y, y * drop * inverse)

    def gradient(y: Any, dy: Any, drop: Any = None) -> tuple[Any, ...]:
        dy = dy if drop is None else dy * drop * inverse
        backward = aten._log_softmax_backward_data if p.is_log else aten._softmax_backward_data
        dx = backward.default(dy, y, -1, y.dtype)
        return (dx if p.scale == 1 else dx * p.scale,)

    return gradient if p.is_grad else forward


def _loss(problem: SoftmaxProblem) -> Callable[..., tuple[Any, ...]]:
    """Cross-entropy in float32, and its gradient written out: what a compiler can make one pass of."""
    torch, p = cudnn.torch_module(), problem
    _require_plain_loss(p, "the expression")

    def loss(x: Any, target: Any, dloss: Any = None) -> tuple[Any, ...]:
        v, counts, label = x.float() * p.scale, target != p.ignore_index, target[:, None]
        log_sum = v.logsumexp(-1, keepdim=True)
        is_label = torch.arange(p.cols, device=x.device) == label
        named = torch.where(is_label, v, 0).sum(-1)
        losses = torch.where(counts, log_sum[:, 0] - named, 0)
        if dloss is None:
            return (losses,)
        weight = torch.where(counts, dloss * p.scale, 0)[:, None]
        return (((v - log_sum).exp() - is_label.float()) * weight).to(x.dtype), losses

    return loss


def _eager_loss(problem: SoftmaxProblem) -> Callable[..., tuple[Any, ...]]:
    """PyTorch's cross-entropy of logits in float32, and its gradient by autograd: what models call."""
    torch, p = cudnn.torch_module(), problem
    _require_plain_loss(p, "PyTorch's cross-entropy")

    def losses(x: Any, target: Any) -> Any:
        entropy = torch.nn.functional.cross_entropy
        return entropy(x.float() * p.scale, target, reduction="none", ignore_index=p.ignore_index)

    def call(x: Any, target: Any, dloss: Any = None) -> tuple[Any, ...]:
        if dloss is None:
            return (losses(x, target),)
        leaf = x.detach().requires_grad_()
        loss = losses(leaf, target)
        return torch.autograd.grad(loss, leaf, dloss)[0], loss.detach()

    return call


def eager(problem: SoftmaxProblem, tensors: Tensors) -> Call:
    """PyTorch's operations one after the other."""
    function = _eager_loss(problem) if problem.is_loss else composition(problem)
    given = _of(problem, tensors, output=False)
    return lambda: function(**given)


def compiled(problem: SoftmaxProblem, tensors: Tensors, mode: str | None = None) -> Call:
    """The same operations through torch.compile, in this process and for these shapes alone.

    Compiles with the first call; what this function returned before compiles anew when it is next called.
    """
    torch = cudnn.torch_module()
    dynamo, inductor = (import_module(f"torch.{name}") for name in ("_dynamo", "_inductor.config"))
    dynamo.reset()  # else a few widths reach its limit of recompilations
    setattr(inductor, "compile_threads", 1)  # noqa: B010 (mypy knows no such attribute)
    function = torch.compile(composition(problem), dynamic=False, fullgraph=True, mode=mode)
    given = _of(problem, tensors, output=False)
    return lambda: function(**given)


def compiled_most(problem: SoftmaxProblem, tensors: Tensors) -> Call:
    """As `compiled`, the fastest of what the compiler tries."""
    return compiled(problem, tensors, "max-autotune-no-cudagraphs")


def cudnn_softmax(problem: SoftmaxProblem, tensors: Tensors) -> Call:
    """cuDNN's softmax, accurate or log, forward or backward, a row to an image.

    Raises UsageError if something is fused, ToolchainError without cuDNN, RuntimeError if it refuses the shape.
    """
    _require_plain(problem, "cuDNN")
    if problem.is_loss:
        raise UsageError("cuDNN has no cross-entropy")
    library = cudnn.library()
    dtype, p = _CUDNN_DTYPES[problem.dtype], problem
    # an image of `cols` channels and one pixel
    shape = cudnn.descriptor(
        "cudnnCreateTensorDescriptor", "cudnnSetTensor4dDescriptor", cudnn.NCHW, dtype, p.rows, p.cols, 1, 1
    )
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    algorithm = _LOG if p.is_log else _ACCURATE
    outputs = list(_of(p, tensors, output=True).values())
    pointers = [cudnn.pointer(tensors[argument.name]) for argument in p.arguments()]

    def forward() -> Sequence[Any]:
        x, y = pointers
        status = library.cudnnSoftmaxForward(
            cudnn.handle(), algorithm, _INSTANCE, ctypes.byref(one), shape, x, ctypes.byref(zero), shape, y
        )
        cudnn.ok(status)
        return outputs

    def backward() -> Sequence[Any]:
        y, dy, dx = pointers
        status = library.cudnnSoftmaxBackward(
            cudnn.handle(), algorithm, _INSTANCE, ctypes.byref(one), shape, y, shape, dy, ctypes.byref(zero), shape, dx
        )
        cudnn.ok(status)
        return outputs

    return backward if p.is_grad else forward


def triton_softmax(problem: SoftmaxProblem, tensors: Tensors) -> Call:
    """The kernels of `triton_softmax`.  Raises UsageError if something is fused, ToolchainError without Triton."""
    if problem.is_loss:
        _require_plain_loss(problem, "the Triton kernel")
    else:
        _require_plain(problem, "the Triton kernel")
    try:
        from benchmarks.peers import triton_softmax as kernels
    except ImportError as error:
        raise ToolchainError(f"Triton does not load ({error}); install the PyTorch that brings it") from None
    ordered = [tensors[argument.name] for argument in problem.arguments()]
    outputs, p = list(_of(problem, tensors, output=True).values()), problem

    def call() -> Sequence[Any]:
        if p.is_loss:
            kernels.launch_loss(dict(tensors), p.rows, p.cols, p.scale, p.ignore_index)
        else:
            kernels.launch(p.function, ordered, p.rows, p.cols)
        return outputs

    return call


PEERS: dict[str, Peer] = {
    "torch": eager,
    "torch.compile": compiled,
    "cudnn": cudnn_softmax,
    "triton": triton_softmax,
    "torch.compile max-autotune": compiled_most,
}
DEFAULT_PEERS = ("torch", "torch.compile", "cudnn", "triton")


def _ends(problem: SoftmaxProblem, tensors: Tensors) -> tuple[Any, Any]:
    """The first input, and the first output if it is of that shape and dtype, else memory that is."""
    source, target = (next(iter(_of(problem, tensors, output).values())) for output in (False, True))
    return source, target if target.shape == source.shape else cudnn.torch_module().empty_like(source)


def torch_copy(problem: SoftmaxProblem, tensors: Tensors) -> Call:
    """``y.copy_(x)`` of the first input to the first output: one read and one write."""
    source, target = _ends(problem, tensors)
    return lambda: (target.copy_(source),)


def memcpy(problem: SoftmaxProblem, tensors: Tensors) -> Call:
    """cudaMemcpyAsync, device to device, of the same."""
    from cuda.bindings import runtime

    torch = cudnn.torch_module()
    source, target = _ends(problem, tensors)
    nbytes, kind = source.numel() * source.element_size(), runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    to, of = target.data_ptr(), source.data_ptr()

    def call() -> Sequence[Any]:
        (status,) = runtime.cudaMemcpyAsync(to, of, nbytes, kind, torch.cuda.current_stream().cuda_stream)
        if status != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(status.name)
        return (target,)

    return call


COPIES: dict[str, Peer] = {"torch": torch_copy, "cudaMemcpyAsync": memcpy}
