"""What is installed, which backend computes the recurrence, and why.

undertow info
undertow info --json info.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class Config:
    """Where to."""

    json: str | None = None
    """Write the facts to this file too; "-": print them as JSON instead."""


def run(config: Config) -> None:
    """Print the facts."""
    from undertow.report import table

    facts = collect()
    if config.json == "-":
        print(json.dumps(facts, indent=1))
        return
    for title, rows in facts.items():
        table(rows.items(), title=f"\n{title}" if title != next(iter(facts)) else title)
    if config.json is not None:
        Path(config.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def collect() -> dict[str, dict[str, Any]]:
    """Versions, machine, and the backend of the recurrence."""
    from importlib.metadata import PackageNotFoundError, version

    from undertow.bench.machine import describe_machine
    from undertow.data import cache_folder
    from undertow.ops import backend_info

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    packages = ("undertow", "torch", "transformers", "accelerate", "tokenizers", "safetensors")
    return {
        "versions": {"python": sys.version.split()[0], **{name: installed(name) for name in packages}},
        "machine": describe_machine(),
        "recurrence": asdict(backend_info()),
        "places": {"token stores": str(cache_folder(None))},
    }
