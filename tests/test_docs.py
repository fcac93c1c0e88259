"""Every command and every example of the README and the docs is run, in smoke size where it is long."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SMALL = (
    "--model.hidden_size 16 --model.projection_size 4 --model.num_hidden_layers 2 --batch_size 4 --window 32 "
    "--eval_tokens 500"
)
# What a command becomes here: it must do the same, only less of it.
SMOKE = [
    (r"^make (test|lint)$", r"make --dry-run \1"),  # would run this test again
    (r"^make wheels$", "make --dry-run wheels"),  # tests/test_wheels.py makes one
    (r"^make demo$", "undertow demo"),
    (r"^make demo-retrofit$", "make --dry-run demo-retrofit"),  # downloads a model; its script has a test of its own
    (r"^(\.venv/bin/)?undertow ", "undertow "),
    (r"^(undertow demo.*)$", r"\1 --minutes 0.01 --eval_tokens 2000 --sample_tokens 20"),
    (r"^(undertow train .*)$", rf"\1 {SMALL}"),
    (r"--minutes \d+(?= .*--eval_tokens 500)", "--steps 4"),
    (r"--steps \d+", "--steps 4"),
    (r"^(undertow retrofit .*)$", r"\1 --window 128 --eval_tokens 200 --precision float32"),
    (r"--vocab_size \d+", "--vocab_size 270"),
    (r"--max_new_tokens \d+", "--max_new_tokens 10"),
    (r"^(undertow eval .*)$", r"\1 --max_tokens 500"),
    # The sizes that a suite has for --smoke, less of it where that starts many processes; tests/bench runs all of it.
    (r"^(undertow bench .*?)( --smoke)?$", r"\1 --smoke --repeats 1"),
    (r"(?<=bench )all(?= .*--smoke)", "ops"),
    (r"^undertow bench (train|ops) --cases \S+( --peers sru lstm)?", r"undertow bench \1"),
    (r"^(undertow bench train .*)$", r"\1 --peers lstm --cases T8-B2-d16-p4-l1"),
    (r"^undertow bench decode --gguf \S+", "undertow bench decode"),
    (r"^undertow bench decode --cases \S+", "undertow bench decode"),
    (r"^undertow bench retrofit --base \S+", "undertow bench retrofit"),
    (r"^undertow bench memory( --cases \S+)?( --text \S+)?", "undertow bench memory --cases write-n60"),
    (r"^(undertow bench startup.*)$", r"\1 --cases import --peers torch"),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def smoke(line: str) -> list[str]:
    for pattern, replacement in SMOKE:
        line = re.sub(pattern, replacement, line)
    words = shlex.split(line, comments=True)
    if words[0] == "undertow":
        return [sys.executable, "-m", *words]
    assert words[0] == "make", f"the test does not know how to run {line!r}: add it to SMOKE"
    return ["make", "--directory", str(ROOT), *words[1:]]


def pretrained(folder: Path) -> None:
    """A base to retrofit, small and untrained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from undertow.data import load_tokenizer

    tokenizer = load_tokenizer("bytes")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "bash")], ids=lambda p: p.name)
def test_commands(page, tmp_path):
    (tmp_path / "my.txt").write_text("Once upon a time there was a current under the surface.\n" * 400)
    if "my-base" in page.read_text():
        pretrained(tmp_path / "my-base")
    done: list[list[str]] = []
    for line in "\n".join(blocks(page, "bash")).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        words = smoke(line)
        if words in done:  # in smoke size the same as another
            continue
        done.append(words)
        run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        assert run.returncode == 0, f"{line}\n-> {shlex.join(words)}\n{run.stdout}\n{run.stderr}"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_examples(page, tmp_path):
    for number, code in enumerate(blocks(page, "python")):
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"example {number + 1} of {page.name}\n{run.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} points to {target}, which is not there"
