"""The tensors here are tiny: one thread is faster than waiting for two."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_repeatable: None) -> None:
    torch.set_num_threads(1)
