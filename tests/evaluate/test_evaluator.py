"""Every target once, against sums done by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from undertow.data import Document, TokenStore, byte_tokenizer
from undertow.evaluate import evaluate
from undertow.evaluate.protocol import attention_window, token_nll
from undertow.models import SRUppConfig, SRUppForCausalLM

TEXTS = (
    b"to be or not to be",
    "ça va très bien, merci".encode(),
    b"x",
    b"a somewhat longer line of text\n" * 3,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Four documents, one of a single byte, one with characters of two bytes."""
    documents = [Document(f"d{i}", text) for i, text in enumerate(TEXTS)]
    return TokenStore.build(documents, byte_tokenizer(), tmp_path_factory.mktemp("store") / "s")


@pytest.fixture(scope="module")
def model() -> SRUppForCausalLM:
    """A small SRU++ in training mode."""
    torch.manual_seed(0)
    config = SRUppConfig(hidden_size=12, projection_size=6, num_hidden_layers=2, attention_window=9, alpha_init=0.3)
    return SRUppForCausalLM(config).train()


@torch.no_grad()
def by_hand(model: nn.Module, texts: tuple[bytes, ...] = TEXTS) -> float:
    """One document at a time, whole, from its separator on."""
    training = model.training
    model.eval()
    total = 0.0
    for text in texts:
        ids = torch.tensor([[256, *text]])
        logits = model(input_ids=ids[:, :-1]).logits[0].double()
        total -= float(torch.log_softmax(logits, -1)[torch.arange(len(text)), ids[0, 1:]].sum())
    model.train(training)
    return total


def test_against_a_sum_by_hand(model: SRUppForCausalLM, store: TokenStore) -> None:
    result = evaluate(model, store, batch_size=2, window=5)
    size = sum(map(len, TEXTS))
    characters = sum(len(text.decode()) for text in TEXTS)
    words = sum(len(text.split()) for text in TEXTS)
    assert (result.targets, result.documents, result.bytes) == (size, 4, size)
    assert (result.characters, result.words, result.cut) == (characters, words, False)
    assert result.nll == pytest.approx(by_hand(model), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(result.nll / math.log(2) / size)
    assert result.bits_per_character == pytest.approx(result.nll / math.log(2) / characters)
    assert result.perplexity == pytest.approx(math.exp(result.nll / size))
    assert result.perplexity_per_word == pytest.approx(math.exp(result.nll / words))
    assert result.state_carried
    assert result.attention_window == 9
    assert result.tokens_per_second > 0
    assert model.training
    assert result.as_dict()["bits_per_byte"] == result.bits_per_byte


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batch_size=st.integers(1, 6), window=st.integers(1, 60))
def test_batch_and_window_do_not_matter(
    model: SRUppForCausalLM, store: TokenStore, batch_size: int, window: int
) -> None:
    assert evaluate(model, store, batch_size=batch_size, window=window).nll == pytest.approx(by_hand(model), rel=1e-6)


@pytest.mark.parametrize("limit", [1, 17, 18, 19, 40, 10_000])
def test_the_first_tokens_only(model: SRUppForCausalLM, store: TokenStore, limit: int) -> None:
    left, texts = limit, []
    for text in TEXTS:
        if left > 0:
            texts.append(text[:left])
        left -= len(text)
    result = evaluate(model, store, batch_size=3, window=7, max_tokens=limit)
    assert result.targets == sum(map(len, texts)) == result.bytes
    assert result.nll == pytest.approx(by_hand(model, tuple(texts)), rel=1e-6)
    assert result.documents == len(texts)
    assert result.cut == (tuple(texts) != TEXTS[: len(texts)])
    words = sum(len(a.split()) * len(b) / len(a) for a, b in zip(TEXTS, texts, strict=False))
    assert result.words == round(words)


def test_few_documents_do_not_leave_rows_empty(model: SRUppForCausalLM, tmp_path: Path) -> None:
    """One long document is one row: it is read in longer windows instead."""
    store = TokenStore.build([Document("one", TEXTS[3])], byte_tokenizer(), tmp_path / "s")
    result = evaluate(model, store, batch_size=8, window=4)
    assert (result.batch_size, result.window) == (1, 32)
    assert result.nll == pytest.approx(by_hand(model, TEXTS[3:]), rel=1e-6)


def test_another_attention_window(model: SRUppForCausalLM, store: TokenStore) -> None:
    wide = evaluate(model, store, attention_window=100)
    assert model.config.attention_window == 9
    assert wide.attention_window == 100
    assert wide.nll != evaluate(model, store).nll
    with attention_window(model, 100):
        assert wide.nll == pytest.approx(by_hand(model), rel=1e-6)
    with pytest.raises(KeyError), attention_window(model, 3):
        raise KeyError
    assert model.config.attention_window == 9


def test_attention_window_of_a_model_without_one(store: TokenStore) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no attention_window"):
        evaluate(llama(), store, attention_window=4)


def llama() -> LlamaForCausalLM:
    """A plain transformer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, bos_token_id=256, eos_token_id=256, **sizes))


@torch.no_grad()
def test_plain_transformer_reads_disjoint_windows(tmp_path: Path) -> None:
    store = TokenStore.build([Document("one", TEXTS[3])], byte_tokenizer(), tmp_path / "s")
    model = llama().eval()
    result = evaluate(model, store, batch_size=4, window=10)
    assert not result.state_carried
    assert (result.batch_size, result.window, result.attention_window) == (4, 10, None)
    ids = torch.tensor([[256, *TEXTS[3]]])
    total = 0.0
    for begin in range(0, len(TEXTS[3]), 10):
        logits = model(input_ids=ids[:, :-1][:, begin : begin + 10]).logits[0].double()
        wanted = ids[0, 1:][begin : begin + 10]
        total -= float(torch.log_softmax(logits, -1)[torch.arange(len(wanted)), wanted].sum())
    assert result.nll == pytest.approx(total, rel=1e-6)


def test_state_not_carried_on_request(model: SRUppForCausalLM, store: TokenStore) -> None:
    cut = evaluate(model, store, batch_size=2, window=5, carry_state=False)
    assert not cut.state_carried
    assert cut.nll > evaluate(model, store, batch_size=2, window=5).nll - 1
    assert cut.nll != pytest.approx(by_hand(model), rel=1e-6)


class Uniform(nn.Module):
    """Knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> Any:
        return SimpleNamespace(logits=self.weight.expand(*input_ids.shape, 256))


def test_knowing_nothing_costs_eight_bits_a_byte(store: TokenStore) -> None:
    result = evaluate(Uniform(), store, batch_size=3, window=4)
    assert result.bits_per_byte == pytest.approx(8.0, rel=1e-7)
    assert result.perplexity == pytest.approx(256.0)


def test_sums_are_exact_over_many_tokens(tmp_path: Path) -> None:
    """A float32 running sum would be off in the fourth digit here."""
    store = TokenStore.build([Document(str(i), b"ab" * 5000) for i in range(20)], byte_tokenizer(), tmp_path / "s")
    result = evaluate(Uniform(), store, batch_size=20, window=1000)
    assert result.nll == pytest.approx(200_000 * math.log(256), rel=1e-7)


def test_text_without_known_sizes(model: SRUppForCausalLM, tmp_path: Path) -> None:
    store = TokenStore.from_ids([[5, 6, 7], [8, 9]], 257, tmp_path / "s", bos_token_id=256)
    result = evaluate(model, store)
    assert result.targets == 5
    assert result.bytes is result.bits_per_byte is result.bits_per_character is result.perplexity_per_word is None


def test_bad_input(model: SRUppForCausalLM, store: TokenStore, tmp_path: Path) -> None:
    for name in ("batch_size", "window", "max_tokens"):
        with pytest.raises(ValueError, match=f"{name} should be at least 1, not 0"):
            evaluate(model, store, **{name: 0})
    with pytest.raises(ValueError, match="precision should be"):
        evaluate(model, store, precision="float16")
    big = TokenStore.from_ids([[5, 600]], 1000, tmp_path / "s", bos_token_id=1)
    with pytest.raises(ValueError, match="outside the vocabulary of 257"):
        evaluate(model, big)
    broken = SRUppForCausalLM(model.config)
    with torch.no_grad():
        broken.lm_head.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="loss is nan"):
        evaluate(broken, store)


def test_bfloat16_is_near(model: SRUppForCausalLM, store: TokenStore) -> None:
    half = evaluate(model, store, precision="bfloat16")
    assert half.precision == "bfloat16"
    assert half.nll == pytest.approx(evaluate(model, store).nll, rel=1e-2)


def test_token_nll_ignores_what_is_not_scored() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    nll = token_nll(logits, torch.tensor([[0, -100, 4], [1, 2, -100]]))
    assert nll.dtype == torch.float32
    assert nll[0, 1] == nll[1, 2] == 0
    assert float(nll[1, 0]) == pytest.approx(-float(torch.log_softmax(logits[1, 0].float(), -1)[1]))
