"""Memory that is kept is there again without being asked for; memory that is given back is gone."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from undertow import allocator
kept = allocator.keep_freed_memory() if "keep" in sys.argv else False
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):  # until there is room for the holes between blocks, too
    torch.ones(8 << 20)
before = faults()
for _ in range(10):
    torch.ones(8 << 20)
print(kept, faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what glibc does")
def test_kept_memory_is_not_asked_for_again():
    def run(*arguments: str) -> tuple[str, int]:
        shown = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
        kept, faults = shown.stdout.split()
        return kept, int(faults)

    kept, faults = run("keep")
    if kept != "True":
        pytest.skip("another C library")
    assert faults < 100
    assert run()[1] > 10 * 100
