"""Whether tensors can be handed to a kernel directly."""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def plain(*tensors: Tensor | None) -> bool:
    """Whether nothing but eager autograd can be watching: no compiler or tracer, no mode, no transform, no subclass.

    Then a kernel is called without the dispatcher, which costs several times what one step of decoding computes. A FLOP
    counter, say, is a mode, and sees the operator.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(a is None or type(a) in _PLAIN_TYPES for a in tensors)
