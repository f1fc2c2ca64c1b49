"""Operators of PyTorch, and a short way to their kernels.

`torch.ops.schedules` has each operator registered with everything that PyTorch asks of one: kernels, fake tensors,
gradients.  A call through PyTorch's dispatcher costs more than many a kernel, so `custom_operator` returns a function
that goes to the kernel directly where the dispatcher would do no more than that, and to the registered operator
wherever anything else has a say: `torch.compile`, fake tensors, modes, functorch's transforms, subclasses, profilers.

Once a call went to its kernel, its like goes there again after one look at the tensors: `Known` keeps calls with the
guard that `torch.compile` has for the tensors of a graph, which compares all that the dispatcher goes by.  Code that
was compiled calls the registered operator, which takes the same way, or where it is inductor's what `straight` makes.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from schedules.core.errors import DerivativeError
from schedules.torch.inductor import tell
from schedules.torch.kernels import REMEMBERED, when_bundles_change

LOWER = "lower"  # what autocast computes with, as opposed to float32
VARIANTS = 8  # calls that are kept of equal shapes and options: of other dtypes, strides, devices, modes of autograd


def _bits(*names: str) -> int:
    keys = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return functools.reduce(operator.or_, (key.raw_repr() for key in keys))


# Sets of the dispatcher's keys, as bits.  For those passed through, the operators have no kernel of their own, but for
# the gradients, which `call` records.
_KERNELS = _bits("CPU"), _bits("CUDA")
_AUTOGRAD = _bits("AutogradCPU", "AutogradCUDA") & ~_bits("CPU", "CUDA")
_RELEVANT = ~(_AUTOGRAD | _bits("ADInplaceOrView", "BackendSelect", "AutocastCPU", "AutocastCUDA")) | _bits(
    "CPU", "CUDA"
)

_keys_of = torch._C._dispatch_keys
_included = torch._C._dispatch_tls_local_include_set
_excluded = torch._C._dispatch_tls_local_exclude_set
_overridden = torch._C._has_torch_function  # by a mode, or the class of a tensor
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_profiling = torch.autograd._profiler_enabled
_modes = torch._C._len_torch_dispatch_stack
_guard = functools.partial(
    torch._C._dynamo.guards.TensorGuards, dynamic_dims_sizes=None, dynamic_dims_strides=None
)  # of classes, keys for the dispatcher as it stands, dtypes, devices, sizes, strides and requires_grad

Launch = Callable[..., Any]  # of tensors that are like those that it was made for


class Known:
    """Calls of one operator that went to their kernels, for those that are like them."""

    def __init__(self) -> None:
        self.calls: tuple[dict[Hashable, Any], ...] = {}, {}  # without and with gradients enabled
        when_bundles_change(self.forget)

    def forget(self) -> None:
        for calls in self.calls:
            calls.clear()

    def find(self, key: Hashable, given: Sequence[Tensor]) -> Launch | None:
        """What to call with the tensors `given`, if the dispatcher would do no more than call the kernel."""
        try:
            ways = self.calls[_grad_enabled()][key]
        except (KeyError, TypeError):  # extents that are symbolic have no hash
            return None
        for like, launch in ways:
            if like(*given):
                if _profiling() or forward_ad._current_level >= 0 or _overridden(given):
                    return None
                return launch  # type: ignore[no-any-return]
        return None

    def keep(self, key: Hashable, given: Sequence[Tensor], launch: Launch) -> None:
        """Keep a call that went to its kernel, unless something was between."""
        recorded = _grad_enabled() and not _excluded().raw_repr() & _AUTOGRAD
        if recorded and any(tensor.requires_grad for tensor in given) or not _nothing_between(given):
            return
        calls = self.calls[_grad_enabled()]
        if len(calls) >= REMEMBERED:
            calls.clear()
        calls[key] = ((_like(given), launch), *calls.get(key, ())[: VARIANTS - 1])


def _like(given: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors are like these; those that are one and the same here, which the guard refuses, must be so too."""
    first = {id(tensor): number for number, tensor in reversed(list(enumerate(given)))}
    check = _guard(*[given[number] for number in sorted(first.values())]).check
    if len(first) == len(given):
        return check  # type: ignore[no-any-return]
    same = [first[id(tensor)] for tensor in given]

    def like(*others: Tensor) -> bool:
        pairs = zip(others, same, strict=True)
        return all(tensor is others[number] for tensor, number in pairs) and check(*dict.fromkeys(others))

    return like


def custom_operator(
    name: str,
    schema: str,
    bind: Callable[..., Launch],
    key: Callable[..., Hashable],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    autocast: str = "",
    strided: bool = False,
) -> Callable[..., Any]:
    """Register ``schedules::name`` and return the function to call it with, its arguments by position.

    `schema` has the tensors first, and no defaults: what inductor writes gives those by name.  `bind` makes, for
    arguments on the CPU or a CUDA GPU, a function of the contiguous (with `strided` any) tensors among them,
    without those that are None, and of all like them: of other tensors only, if `key` of the arguments is the same:
    the options, which optional tensors are None, and shapes that tell most calls apart.  `fake` is the kernel of
    fake tensors; `context` keeps in its first argument, from the arguments and results, what `backward` needs (as
    `setup_context` and `backward` of a `torch.autograd.Function`).  Under autocast tensors are cast to its dtype
    with LOWER, and on a GPU to float32 with "float32", as PyTorch's autocast does with an operator of that kind.
    """
    qualified = f"schedules::{name}"
    torch.library.define(qualified, schema)
    registered = getattr(torch.ops.schedules, name).default  # bound once: to look it up takes microseconds
    tensors = sum("Tensor" in str(argument.type) for argument in registered._schema.arguments)
    known, dispatched = Known(), registered._op  # PyTorch's dispatcher
    # code that was compiled guards what its trace looked up in this module: it finds no more than these, here
    compiling, copied = torch.compiler.is_dynamo_compiling, 0 if strided else tensors

    def look(arguments: Sequence[Any], given: Sequence[Tensor]) -> Launch | None:
        try:
            wanted = key(*arguments)
        except TypeError:  # a number for two, as PyTorch takes it
            return None
        return known.find(wanted, given)

    def run(*arguments: Any) -> Any:
        """The kernel."""
        given = [tensor for tensor in arguments[:tensors] if tensor is not None]
        launch = look(arguments, given)
        if launch is not None:
            return launch(*given)
        launch = bind(*arguments)
        if not strided and not all(tensor.is_contiguous() for tensor in given):
            launch = functools.partial(_copied, launch)
        results = launch(*given)
        known.keep(key(*arguments), given, launch)
        return results

    def faked(*arguments: Any) -> Any:
        tell(registered)  # whoever compiles comes by here
        return fake(*arguments)

    torch.library.impl(qualified, ["cpu", "cuda"], run)
    torch.library.register_fake(qualified, faked)
    torch.library.register_autograd(qualified, backward, setup_context=context)
    for device in ("cpu", "cuda") if autocast == LOWER else ("cuda",) if autocast else ():
        torch.library.impl(qualified, f"Autocast{device.upper()}", _casting(registered, tensors, autocast, device))

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = run(*arguments)
        if context is not None:
            context(ctx, arguments, results)
        return results

    recorded = type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    # Function.apply itself first asks for functorch's transforms, which are none here
    record = super(Function, recorded).apply  # type: ignore[misc]

    def plain(arguments: tuple[Any, ...]) -> Sequence[Any]:
        """The same with contiguous tensors, which what traces the call then sees: a compiler may write a tensor so at
        once, where a copy in the kernel comes after it."""
        return [*map(_contiguous, arguments[:copied]), *arguments[copied:]]

    def call(*arguments: Any, **named: Any) -> Any:
        if compiling():
            whole = [tensor if tensor is None else tensor.contiguous() for tensor in arguments[:copied]]
            return registered(*whole, *arguments[copied:])
        if named:  # of the registered operator only
            return dispatched(*arguments, **named)
        given = [tensor for tensor in arguments[:tensors] if tensor is not None]
        launch = look(arguments, given)
        if launch is not None:
            return launch(*given)
        if autocast and _any_autocast():
            return dispatched(*arguments)
        if not _nothing_between(given):
            _refuse_tangents(name, given)
            return dispatched(*plain(arguments))
        if _grad_enabled():
            for tensor in given:
                if tensor.requires_grad:
                    # in the kernel of another operator, autograd is left out
                    return (run if _excluded().raw_repr() & _AUTOGRAD else record)(*arguments)
        return run(*arguments)

    registered._op = call  # what is called by its name, in code that inductor wrote too, goes the same way
    _found[call] = lambda *arguments: look(arguments, tensors_of(arguments[:tensors]))
    return call


_made: weakref.WeakSet[Any] = weakref.WeakSet()  # by `straight`


def _forget_straight() -> None:
    for function in list(_made):
        function.forget()


when_bundles_change(_forget_straight)


def straight(registered: Callable[..., Any], arguments: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """`registered` of the `arguments` of tensors, as a function of these for code that inductor wrote: which made sure
    that they are always alike, so that it looks at them until their kernel is known, and then no more."""
    look, launch = _found[registered._op], None  # type: ignore[attr-defined]

    def call(*tensors: Tensor) -> Any:
        if launch is None or _profiling() or _modes():
            return otherwise(tensors)
        return launch(*tensors)

    def otherwise(tensors: tuple[Tensor, ...]) -> Any:
        nonlocal launch
        given = arguments(*tensors)
        results = registered(*given)
        launch = look(*given)
        return results

    def forget() -> None:
        nonlocal launch
        launch = None

    call.forget = forget  # type: ignore[attr-defined]
    _made.add(call)
    return call


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor.contiguous() if isinstance(tensor, Tensor) and tensor.layout is torch.strided else tensor


_found: dict[Any, Callable[..., Launch | None]] = {}  # by operator: `Known.find` of its calls
_view = torch._C._dynamo.guards._reinterpret_tensor  # of memory, in half the time that `permute` takes


def tensors_of(given: Sequence[Tensor | None]) -> list[Tensor]:
    """Those of `given` that are tensors."""
    return [tensor for tensor in given if tensor is not None]


def found(call: Callable[..., Any], given: Sequence[Tensor | None], views: Sequence[Any], result: Tensor) -> Any:
    """What makes `result` of the tensors `given`, and what is like it of others like them, where `views` of them are
    the first arguments, of all of `views`, of an operator that went to its kernel; else None."""
    launch = _found[call](*views)
    pairs = [(old, new) for old, new in zip(given, views, strict=False) if old is not None]
    if launch is None or any(old.data_ptr() != new.data_ptr() for old, new in pairs):
        return None
    forms = [None if old is new else (new.shape, new.stride()) for old, new in pairs]
    if forms.count(None) == len(forms):
        return launch
    shape, strides = result.shape, result.stride()
    if hasattr(launch, "making"):
        return launch.making(result)

    def make(*tensors: Tensor) -> Tensor:
        made = launch(*[t if form is None else _view(t, *form) for t, form in zip(tensors, forms, strict=True)])
        return _view(made, shape, strides)

    return make


def _copied(launch: Launch, *tensors: Tensor) -> Any:
    return launch(*[tensor.contiguous() for tensor in tensors])


def _casting(registered: Any, tensors: int, autocast: str, device: str) -> Callable[..., Any]:
    """The operator under autocast."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def call(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device) if autocast == LOWER else torch.float32
        cast = [
            part.to(dtype)
            if isinstance(part, Tensor) and part.is_floating_point() and part.dtype != torch.float64
            else part
            for part in arguments[:tensors]
        ]
        with torch._C._ExcludeDispatchKeyGuard(key):
            return registered(*cast, *arguments[tensors:])

    return call


def _nothing_between(tensors: Sequence[Tensor]) -> bool:
    """Whether PyTorch's dispatcher, given these tensors now, would do no more than record the call for autograd and
    call the kernel."""
    if _overridden(tensors) or _profiling() or forward_ad._current_level >= 0:
        return False
    keys = _included()
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return False
        keys = keys | _keys_of(tensor)
    return keys.raw_repr() & _RELEVANT in _KERNELS


def _refuse_tangents(name: str, tensors: Sequence[Tensor]) -> None:
    """PyTorch would leave them out of the result without a word."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise DerivativeError(f"{name} has no forward derivative here; use PyTorch's own where one is needed")
