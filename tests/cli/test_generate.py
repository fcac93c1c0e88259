"""undertow generate, info and demo, as a person calls them."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from undertow.cli.generate import sampling, write
from undertow.cli.main import main
from undertow.data import byte_tokenizer
from undertow.models import SRUppConfig, SRUppForCausalLM


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return SRUppForCausalLM(
        SRUppConfig(hidden_size=16, projection_size=8, num_hidden_layers=2, attention_window=8)
    ).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def written(model, prompt, n, **options):
    out = []
    write(model, torch.tensor([prompt]), out.append, max_new_tokens=n, **options)
    return out


def test_writing_is_greedy_decoding_across_pieces(model, monkeypatch):
    """Starting `generate` anew, and reading a long prompt in pieces, change nothing."""
    monkeypatch.setattr("undertow.cli.generate.PIECE", 5)
    prompt = [256, *b"abcdefghijklmnop"]
    got = written(model, prompt, 17, stop=False, **sampling(0))
    ids = prompt
    for _ in range(17):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    assert got == ids[len(prompt) :]


def test_it_stops_at_the_end_of_the_text(model):
    prompt = [256, *b"ab"]
    free = written(model, prompt, 8, stop=False, **sampling(0))
    model.generation_config.eos_token_id = free[3]
    try:
        stopped = written(model, prompt, 8, **sampling(0))
    finally:
        model.generation_config.eos_token_id = 256
    assert stopped == free[: free.index(free[3])]


def test_a_model_without_state_writes_too_but_not_for_ever():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    assert len(written(llama.eval(), [1, 2, 3], 7, stop=False, **sampling(0.8))) == 7
    with pytest.raises(ValueError, match="carries no state"):
        written(llama, [1, 2, 3], 0)


def test_a_plain_base_writes_as_far_as_it_knows_positions(bases, capsys, monkeypatch):
    from undertow.retrofit.base import Base

    gpt2 = str(bases / "gpt2")
    monkeypatch.setattr("undertow.retrofit.base.find_base", lambda place, **more: Base(place, gpt2))
    words = ["--stop", "false", "--temperature", "0", "--device", "cpu"]
    for place in (gpt2, "package:some", "some.gguf"):
        assert main(["generate", place, "ab", "--max_new_tokens", "100", *words]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("ab")
        assert "this model knows 64 positions: 61 new tokens at most" in err
    assert main(["generate", gpt2, "ab" * 40, *words]) == 2
    assert "the prompt has 81 tokens, and this model knows 64 positions" in capsys.readouterr().err
    assert main(["generate", gpt2, "ab", "--max_new_tokens", "0", *words]) == 2
    assert "carries no state" in capsys.readouterr().err


def test_the_command_repeats_itself_with_a_seed(folder, capsys):
    texts = []
    for _ in range(2):
        assert main(["generate", folder, "def ", "--seed", "3", "--max_new_tokens", "20", "--stop", "false"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")


def test_a_prompt_from_standard_input_need_not_be_utf8(folder):
    words = [sys.executable, "-m", "undertow", "generate", folder, "--max_new_tokens", "3"]
    run = subprocess.run(words, input=b"\xff\xfe", capture_output=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.decode().startswith("\ufffd\ufffd")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "which model"),
        (["generate", "/none"], "no folder /none"),
        (["generate", "FOLDER", "x", "--temperature", "-1"], "temperature"),
        (["generate", "FOLDER", "x", "--top_p", "2"], "top_p"),
        (["generate", "FOLDER", "x", "--max_new_token", "2"], "did you mean --max_new_tokens"),
        (["demo", "--minutes", "0"], "minutes"),
    ],
)
def test_mistakes_are_told_in_a_line_or_two(words, message, folder, capsys):
    assert main([folder if word == "FOLDER" else word for word in words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) <= 2


def test_info_says_which_backend_runs_and_why(capsys):
    assert main(["info", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["recurrence"]["name"] in ("cpu", "reference")
    assert facts["recurrence"]["reason"]
    assert facts["versions"]["torch"] == torch.__version__
    assert main(["info"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1', "unexpected model.layers.1"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 3', "missing model.layers.2"),
        ('"hidden_size": 16', '"hidden_size": 32', "shapes"),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_refused(old, new, message, folder, tmp_path, capsys):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    text = (copy / "config.json").read_text()
    assert old in text
    (copy / "config.json").write_text(text.replace(old, new))
    assert main(["generate", str(copy), "x"]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_tokenizer_is_named_and_nothing_is_asked(folder, tmp_path, capsys):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "tokenizer.json").unlink()
    assert main(["generate", str(copy), "x"]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err
