"""Whether tensors can be handed to a kernel directly."""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def traced() -> bool:
    """Whether a compiler, a tracer or a functional transform (vmap, jvp, ...) is at work."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def plain(*tensors: Tensor | None) -> bool:
    """Whether nothing but eager autograd can be watching: no compiler or tracer, no mode, no transform, no subclass.

    Then a kernel is called without the dispatcher, which costs several times what one step of decoding computes. A FLOP
    counter, say, is a mode, and sees the operator.
    """
    if traced() or torch._C._len_torch_dispatch_stack():
        return False
    return all(a is None or type(a) in _PLAIN_TYPES for a in tensors)
