"""Writing takes constant memory, however long the text."""

import json
import subprocess
import sys

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
