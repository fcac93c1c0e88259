"""Optimisers and the learning rate's course."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from undertow.evaluate.protocol import base_of
from undertow.train.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """RAdam or AdamW over the trainable parameters, with decoupled weight decay.

    RAdam: Liu et al., arXiv 1908.03265; torch's own default there is L2 regularisation, which is why it is asked for
    ``decoupled_weight_decay``. AdamW: Loshchilov and Hutter, arXiv 1711.05101.

    Each group holds as ``pace`` what its learning rate is of ``config.learning_rate``: 1, and for the parameters of a
    pretrained base inside the model ``base_learning_rate / learning_rate``.
    """
    base = base_of(model)
    of_base = set() if base is None else {id(parameter) for parameter in base.parameters()}
    base_pace = 1.0 if config.base_learning_rate is None else config.base_learning_rate / config.learning_rate
    kinds = [(pace, decay) for pace in (1.0, base_pace) for decay in (config.weight_decay, 0.0)]
    members: list[list[nn.Parameter]] = [[] for _ in kinds]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = config.decay == "all" or _is_matrix(name, parameter)
            members[2 * (id(parameter) in of_base) + (not decays)].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "lr": config.learning_rate * pace, "weight_decay": decay, "pace": pace}
        for parameters, (pace, decay) in zip(members, kinds, strict=True)
        if parameters
    ]
    if not groups:
        raise ValueError("the model has no trainable parameter")
    betas = (config.beta1, config.beta2)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)
    return FusedRAdam(
        groups, lr=config.learning_rate, betas=betas, eps=config.eps, decoupled_weight_decay=True, foreach=True
    )


class FusedRAdam(torch.optim.RAdam):
    """RAdam that passes over memory once on the CPU, where torch's passes about ten times.

    Once its variance is tractable, RAdam is Adam with a learning rate scaled by the rectification ``r_t`` and eps over
    the square root of the second bias correction; torch has a fused kernel for that. Dividing the decay by ``r_t``
    keeps the decay what it was. The first steps, and other devices, are left to torch. States are interchangeable.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As in torch."""
        step = self._common_step()
        if closure is not None or step is None:
            return super().step(closure)
        rectified = [_rectification(step, group["betas"][1]) for group in self.param_groups]
        if any(r is None for r in rectified) or not all(g["decoupled_weight_decay"] for g in self.param_groups):
            return super().step()
        for group, r in zip(self.param_groups, rectified, strict=True):
            assert r is not None
            beta1, beta2 = group["betas"]
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in parameters]
            adamw(
                parameters,
                [p.grad for p in parameters if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"] * r,
                weight_decay=group["weight_decay"] / r,
                eps=group["eps"] / math.sqrt(1 - beta2**step),
                maximize=group["maximize"],
            )
        return None

    def _common_step(self) -> int | None:
        """The number of this step where all parameters are on the CPU and have made the same number, else None."""
        steps = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state or parameter.device.type != "cpu" or parameter.is_complex():
                        return None
                    steps.add(float(state["step"]))
        return int(steps.pop()) + 1 if len(steps) == 1 else None


def _rectification(step: int, beta2: float) -> float | None:
    """``r_t`` of the paper; None while the variance of the adaptive rate is not tractable."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step)  # of the approximated simple moving average
    if length <= 5:
        return None
    return math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take up what an optimiser has gathered (moments, steps), under the present settings instead of those of then."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    # A recurrent cell keeps its gates' vectors and biases as two rows of one tensor: vectors all the same.
    last = name.rpartition(".")[2]
    return parameter.ndim >= 2 and "bias" not in last and last not in ("weight_c", "alpha")


def progress(config: TrainConfig, step: int, seconds: float) -> float:
    """The share of the budget that is used up, in [0, 1]: steps or minutes, whichever is further."""
    shares = [0.0]
    if config.steps is not None:
        shares.append(step / config.steps)
    if config.minutes is not None:
        shares.append(seconds / (60 * config.minutes))
    return min(1.0, max(shares))


def learning_rate(config: TrainConfig, step: int, seconds: float = 0.0) -> float:
    """The learning rate of the step that follows ``step`` steps and ``seconds`` of training.

    Linear warm-up to ``learning_rate``, then constant or ``floor + (top - floor) (1 + cos(pi s)) / 2`` where s runs
    from 0 at the end of the warm-up to 1 at the end of the budget. The first step has a rate above zero.
    """
    top, floor = config.learning_rate, config.min_learning_rate
    used = progress(config, step, seconds)
    if config.warmup >= 1:
        if step + 1 < config.warmup:
            return top * (step + 1) / config.warmup
        # The share of the budget at which the warm-up ended; with minutes it is known only by the pace so far.
        start = config.warmup / config.steps if config.steps else min(used, used * config.warmup / max(step, 1))
    else:
        start = config.warmup
        ahead = progress(config, step + 1, seconds)
        if ahead < start:
            return top * ahead / start if ahead > 0 else top * 1e-3
    if config.schedule == "constant":
        return top
    along = min(1.0, max(0.0, (used - start) / max(1e-12, 1 - start)))
    return floor + (top - floor) * (1 + math.cos(math.pi * along)) / 2
