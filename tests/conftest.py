"""What all tests share: hypothesis that repeats itself, torch that repeats itself."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

# The same examples every time, and no limit on a single example's time: the machine may be busy.
hypothesis.settings.register_profile(
    "undertow",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("undertow")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
