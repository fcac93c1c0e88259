"""Writing and reading take constant memory, however long the text."""

import json
import os
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

from undertow.data import byte_tokenizer
from undertow.models import SRUppConfig, SRUppForCausalLM
from undertow.retrofit import RecurrenceConfig, add_recurrence

CODE = """
import json, psutil, torch
from undertow.cli.generate import sampling, write
from undertow.models import SRUppConfig, SRUppForCausalLM

torch.set_num_threads(1)
torch.manual_seed(0)
model = SRUppForCausalLM(SRUppConfig(hidden_size=16, projection_size=8, num_hidden_layers=2, attention_window=64))
model.eval()
resident, seen = {}, 0

def count(token):
    global seen
    seen += 1
    if seen in (1500, 6000):
        resident[seen] = psutil.Process().memory_info().rss

write(model, torch.tensor([[256]]), count, max_new_tokens=6000, stop=False, **sampling(1.0))
print(json.dumps(resident))
"""


def test_resident_size_does_not_grow_with_what_was_written():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    resident = json.loads(run.stdout)
    assert resident["6000"] <= 1.01 * resident["1500"], resident


def read(model, tokens, tmp_path, *more):
    """What ``undertow read`` tells of a text of so many bytes."""
    book, facts = tmp_path / f"{tokens}.txt", tmp_path / f"{tokens}.json"
    line = b"a line of a text that goes on and on in words that are not always the same \n"
    book.write_bytes((line * (tokens // len(line) + 1))[:tokens])
    words = ["read", str(book), "--model", str(model), "--json", str(facts), "--save", str(tmp_path / "s.state")]
    command = [sys.executable, "-m", "undertow", *words, "--device", "cpu", "--overwrite", *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(facts.read_text())


def test_reading_takes_no_more_memory_for_a_longer_text(tmp_path, bases):
    """SRU++ over 200 times the text; a retrofit, which is slower with so small a model, over 20 times."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "projection_size": 8, "num_hidden_layers": 2, "attention_window": 64}
    srupp = SRUppForCausalLM(SRUppConfig(**sizes))
    retrofit = add_recurrence(
        AutoModelForCausalLM.from_pretrained(bases / "llama"), RecurrenceConfig(window=64, slots=4)
    )
    for name, model, tokens in (("srupp", srupp, 200_000), ("retrofit", retrofit, 20_000)):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        short, long = (read(tmp_path / name, n, tmp_path) for n in (1000, tokens))
        assert (short["tokens"], long["tokens"]) == (1000, tokens)
        assert long["peak_resident_bytes"] <= 1.02 * short["peak_resident_bytes"], (name, short, long)
        assert long["state_bytes"] <= 1.1 * short["state_bytes"]
