"""Every policy against a naive loop over the plain base, and the faults that evaluations are known for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import undertow
from undertow.data import Document, TokenStore, byte_tokenizer
from undertow.evaluate import PolicyResult, compare, evaluate, plan
from undertow.evaluate.policies import CHANCE, SWAPPED, Unable, check_policies
from undertow.models import SRUppConfig, SRUppForCausalLM
from undertow.retrofit import RecurrenceConfig

BOS = 256
TEXTS = (
    b"It was the best of times, it was the worst of times, it was the age of wisdom.",
    b"x",
    b"Call me Ishmael. Some years ago",
    b"It is a truth universally acknowledged, that a man in possession of a fortune ...",
)
IDS = {"vocab_size": 257, "bos_token_id": BOS, "eos_token_id": BOS}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Four documents of 78, 1, 31 and 81 bytes."""
    documents = [Document(f"d{i}", text) for i, text in enumerate(TEXTS)]
    return TokenStore.build(documents, byte_tokenizer(), tmp_path_factory.mktemp("store") / "s")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """The same without a separator."""
    return TokenStore.from_ids([list(t) for t in TEXTS], 257, tmp_path_factory.mktemp("bare") / "s")


def llama(limit: int = 128) -> LlamaForCausalLM:
    """A small base with rotary positions, far from indifferent to what it sees."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=limit, initializer_range=0.4, **IDS,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    """A small base with absolute positions."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=24, n_layer=2, n_head=4, n_positions=64, initializer_range=0.4, **IDS)
    return GPT2LMHeadModel(config).eval()


def srupp() -> SRUppForCausalLM:
    torch.manual_seed(0)
    config = SRUppConfig(hidden_size=12, projection_size=6, num_hidden_layers=2, attention_window=15, alpha_init=0.3)
    return SRUppForCausalLM(config).eval()


@pytest.fixture(scope="module")
def retrofit() -> Any:
    """A base with slots whose gates are open, so that memory matters."""
    model = undertow.add_recurrence(llama(), RecurrenceConfig(window=12, slots=4, update="tanh"))
    with torch.no_grad():
        for name, parameter in model.recurrence.named_parameters():
            parameter.fill_(1.5) if "gate" in name else parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def cost(model: nn.Module, context: list[int], target: int) -> float:
    """Of one target after exactly this context, in one forward of its own."""
    logits = model(input_ids=torch.tensor([context])).logits[0, -1].double()
    return -float(torch.log_softmax(logits, -1)[target])


def by_hand(model: nn.Module, window: int, stride: int, texts: tuple[bytes, ...] = TEXTS, bos: bool = True) -> Any:
    """(document, place) -> nats, for windows of `window` of which each scores `stride` (the first one all).

    Input t stands in stride t // C, whose window begins `window - stride` before the stride does.
    """
    found = {}
    for number, text in enumerate(texts):
        ids = [BOS, *text] if bos else list(text)
        for t in range(len(ids) - 1):
            first = max(0, t // stride * stride - (window - stride))
            found[number, t] = cost(model, ids[first : t + 1], ids[t + 1])
    return found


def only(results: list[PolicyResult]) -> PolicyResult:
    (result,) = results
    return result


# ---- each target once, with exactly the text before it that the policy lets it see


@pytest.mark.parametrize("base", [llama, gpt2])
@pytest.mark.parametrize(("policy", "window", "stride"), [("disjoint", 16, 16), ("overlap", 16, 8), ("overlap", 10, 5)])
def test_windows_against_a_naive_loop(
    base: Any, policy: str, window: int, stride: int, store: TokenStore, bare: TokenStore
) -> None:
    """Fault: one off where windows meet; a short first or last window; documents that see one another."""
    model = base()
    for text, bos in ((store, True), (bare, False)):
        expected = by_hand(model, window, stride, bos=bos)
        result = only(compare(model, text, [policy], remembered=window, batch_size=2, window=7)).evaluation
        assert result.targets == len(expected) == sum(map(len, TEXTS)) - (0 if bos else len(TEXTS))
        assert result.nll == pytest.approx(sum(expected.values()), rel=1e-6)
        for document in result.by_document:
            number = int(document.name.removeprefix("d").removeprefix("ocument "))
            own = [nats for (d, _), nats in expected.items() if d == number]
            assert document.targets == len(own)
            assert document.nll == pytest.approx(sum(own), rel=1e-5)
        # The evaluator's own windows and the wrapper's are the same.
        alone = evaluate(model, text, window=window, stride=stride, batch_size=3)
        assert alone.nll == pytest.approx(result.nll, rel=1e-6)
        assert alone.targets_by_position == result.targets_by_position
        # By position: the place in the window.
        for place, nats in enumerate(result.loss_by_position):
            lead = window - stride
            here = [n for (_, t), n in expected.items() if (t if t < lead else lead + (t - lead) % stride) == place]
            assert result.targets_by_position[place] == len(here)
            assert nats == (pytest.approx(sum(here) / len(here), rel=1e-5) if here else None)


def test_sliding_against_a_mask(store: TokenStore) -> None:
    """In one layer, what a query sees of a window and sinks is what one forward with their positions sees."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.4, **IDS,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    W = 8
    total = 0.0
    with torch.no_grad():
        for text in TEXTS:
            ids = [BOS, *text]
            for t in range(len(text)):
                seen = [j for j in range(t + 1) if j > t - W or j < 4]
                # Numbers inside the cache: within a stride of 2 the sinks stand just before the window's oldest.
                shift = max(0, t // 2 * 2 + 2 - (4 + W - 1 + 2))
                places = torch.tensor([[j if j < 4 else j - shift for j in seen]])
                logits = model(input_ids=torch.tensor([[ids[j] for j in seen]]), position_ids=places).logits
                total -= float(torch.log_softmax(logits[0, -1].double(), -1)[ids[t + 1]])
    result = only(compare(model, store, ["sliding"], remembered=W)).evaluation
    assert result.nll == pytest.approx(total, rel=1e-6)


def test_everything_is_the_whole_text(store: TokenStore) -> None:
    model = llama()
    whole = by_hand(model, 1000, 1000)
    result = only(compare(model, store, ["everything"], context=96))
    assert result.evaluation.nll == pytest.approx(sum(whole.values()), rel=1e-6)
    assert (result.way.window, result.way.sinks) == (96, 4)


@pytest.mark.parametrize("policy", ["disjoint", "overlap", "sliding", "select", "everything"])
def test_rows_and_pieces_do_not_matter(policy: str, store: TokenStore) -> None:
    model = llama()
    one = only(compare(model, store, [policy], remembered=32, context=32, batch_size=1, window=1000, controls=False))
    two = only(compare(model, store, [policy], remembered=32, context=32, batch_size=4, window=5, controls=False))
    assert two.evaluation.nll == pytest.approx(one.evaluation.nll, rel=1e-5)
    assert two.evaluation.targets_by_position == one.evaluation.targets_by_position


@pytest.mark.parametrize("policy", ["disjoint", "overlap", "sliding", "select", "everything", "carry"])
def test_nothing_is_left_of_the_document_before(policy: str, store: TokenStore, retrofit: Any, tmp_path: Path) -> None:
    """Fault: a cache that is not reset between documents. Here one row reads them all."""
    model = retrofit if policy == "carry" else llama()
    options: dict[str, Any] = {"context": 32, "controls": False, "batch_size": 1, "window": 10}
    if policy != "carry":
        options["remembered"] = 16
    together = only(compare(model, store, [policy], **options)).evaluation
    for number, text in enumerate(TEXTS):
        alone = TokenStore.build([Document("alone", text)], byte_tokenizer(), tmp_path / str(number))
        own = only(compare(model, alone, [policy], **options)).evaluation
        assert together.by_document[number].nll == pytest.approx(own.nll, rel=1e-5)


# ---- prefixes, shifts, weights, words


@pytest.mark.parametrize("base", [llama, gpt2, srupp])
def test_the_separator_is_the_same_for_all(base: Any, store: TokenStore, bare: TokenStore) -> None:
    """Fault: no BOS, or one more for each window: the first token after it costs the same under every policy."""
    model = base()
    absolute, stateful = base is gpt2, base is srupp
    policies = ["disjoint", "overlap"]
    if stateful:
        policies = ["carry", *policies]
    elif not absolute:
        policies += ["sliding", "select", "everything"]
    options: dict[str, Any] = {"remembered": 16, "controls": False, "per_document_tokens": 1}
    first = sum(cost(model, [BOS], text[0]) for text in TEXTS)
    for result in compare(model, store, policies, **options):
        assert result.evaluation.bos_token_id == BOS
        assert result.evaluation.targets == len(TEXTS), "the first tokens are scored"
        assert result.evaluation.nll == pytest.approx(first, rel=1e-6), result.policy
    # Without one, they are not.
    options["per_document_tokens"] = 2
    second = sum(cost(model, [text[0]], text[1]) for text in TEXTS if len(text) > 1)
    for result in compare(model, bare, policies, **options):
        assert result.evaluation.bos_token_id is None
        assert result.evaluation.targets == len(TEXTS) - 1
        assert result.evaluation.nll == pytest.approx(second, rel=1e-6), result.policy


class Table(nn.Module):
    """Predicts from the present token alone: `shift` 1 gives what follows it in the alphabet, 0 itself."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.shift = shift

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> Any:
        return SimpleNamespace(logits=30.0 * nn.functional.one_hot((input_ids + self.shift) % 257, 257).float())


def test_logits_are_scored_against_the_next_token(tmp_path: Path) -> None:
    """Fault: unshifted logits. A model that repeats its input would then look perfect."""
    store = TokenStore.build([Document("a", bytes(range(60)))], byte_tokenizer(), tmp_path / "s")
    for stride in (16, 8, 5, 1):
        assert evaluate(Table(1), store, window=16, stride=stride).perplexity == pytest.approx(1, rel=1e-6)
        assert evaluate(Table(0), store, window=16, stride=stride).loss > 29


def test_windows_are_weighed_by_their_targets(store: TokenStore) -> None:
    """Fault: the mean of the windows' means, in which a last window of one token counts as much as a full one."""
    model = llama()
    expected = by_hand(model, 16, 16)
    windows: dict[tuple[int, int], list[float]] = {}
    for (document, t), nats in expected.items():
        windows.setdefault((document, t // 16), []).append(nats)
    wrong = sum(sum(w) / len(w) for w in windows.values()) / len(windows)
    right = sum(expected.values()) / len(expected)
    assert abs(wrong - right) > 0.01
    result = only(compare(model, store, ["disjoint"], remembered=16)).evaluation
    assert result.loss == pytest.approx(right, rel=1e-6)
    # Nor are documents or positions weighed alike: both sum to the whole.
    assert sum(d.nll for d in result.by_document) == pytest.approx(result.nll)
    assert sum(result.nll_by_position) == pytest.approx(result.nll)
    assert sum(d.targets for d in result.by_document) == sum(result.targets_by_position) == result.targets


def test_words_are_not_tokens(store: TokenStore) -> None:
    """Fault: perplexity per word and per token confused."""
    for result in compare(llama(), store, ["disjoint", "sliding"], remembered=16):
        evaluation = result.evaluation
        words = sum(len(text.split()) for text in TEXTS)
        assert evaluation.words == words
        assert evaluation.perplexity == pytest.approx(math.exp(evaluation.nll / evaluation.targets))
        assert evaluation.perplexity_per_word == pytest.approx(math.exp(evaluation.nll / words))
        assert evaluation.bits_per_byte == pytest.approx(evaluation.nll / math.log(2) / sum(map(len, TEXTS)))
        first = evaluation.by_document[0]
        assert first.words == len(TEXTS[0].split())
        assert first.perplexity_per_word == pytest.approx(math.exp(first.nll / len(TEXTS[0].split())))
        assert first.bits_per_byte == pytest.approx(first.nll / math.log(2) / len(TEXTS[0]))


@pytest.mark.parametrize("policy", ["disjoint", "overlap", "sliding"])
def test_a_part_of_each_document(policy: str, store: TokenStore) -> None:
    """What is skipped is read, so the rest costs what it costs in the whole."""
    model = llama()
    whole = only(compare(model, store, [policy], remembered=16)).evaluation
    part = only(compare(model, store, [policy], remembered=16, skip_tokens=20, per_document_tokens=50)).evaluation
    head = only(compare(model, store, [policy], remembered=16, per_document_tokens=20)).evaluation
    body = only(compare(model, store, [policy], remembered=16, per_document_tokens=50)).evaluation
    assert part.targets == 30 + 11 + 30
    assert part.nll + head.nll == pytest.approx(body.nll, rel=1e-6)
    assert whole.targets == 191
    assert (part.cut, part.skip_tokens, part.per_document_tokens) == (True, 20, 50)
    assert part.bytes == part.targets
    assert [d.name for d in part.by_document] == ["d0", "d2", "d3"]


# ---- models with a memory


def test_a_model_with_a_state(store: TokenStore) -> None:
    model = srupp()
    results = {r.policy: r for r in compare(model, store, ["carry", "disjoint", "overlap"])}
    assert [r.way.remembered for r in results.values()] == [16, 16, 16], "the window and the present position"
    assert results["carry"].evaluation.nll == pytest.approx(evaluate(model, store).nll, rel=1e-6)
    assert results["carry"].evaluation.state_carried
    for policy, stride in (("disjoint", 16), ("overlap", 8)):
        expected = sum(by_hand(model, 16, stride).values())
        assert results[policy].evaluation.nll == pytest.approx(expected, rel=1e-6)
        assert not results[policy].evaluation.state_carried
    wide = only(compare(model, store, ["carry"], attention_window=31))
    assert wide.way.remembered == 32
    assert wide.evaluation.attention_window == 31
    assert model.config.attention_window == 15


def test_a_retrofit_beside_its_base(store: TokenStore, retrofit: Any) -> None:
    results = compare(retrofit, store, ["carry", "sliding", "disjoint"], name="ours")
    carry, swapped, sliding, disjoint = results
    assert [r.control for r in results] == [None, SWAPPED, None, None]
    assert {r.way.remembered for r in results} == {16}, "12 of the window and 4 slots"
    assert (carry.way.window, carry.way.slots) == (12, 4)
    assert sliding.way.window == 16
    assert carry.evaluation.nll == pytest.approx(evaluate(retrofit, store).nll, rel=1e-6)
    assert swapped.evaluation.targets == carry.evaluation.targets
    assert swapped.evaluation.nll != pytest.approx(carry.evaluation.nll, rel=1e-4)
    assert not retrofit.swap_states
    plain = compare(retrofit.base, store, ["sliding", "disjoint"], remembered=16)
    for ours, theirs in zip((sliding, disjoint), plain, strict=True):
        assert ours.evaluation.nll == theirs.evaluation.nll
    assert only(compare(retrofit, store, ["carry"], controls=False)).evaluation.nll == carry.evaluation.nll
    assert carry.costs.flops_per_token > sliding.costs.flops_per_token * 0.5
    assert json.loads(json.dumps(carry.as_dict()))["memory"] == {
        "window": 12, "slots": 4, "selected": 0, "sinks": 4, "stride": carry.way.stride, "remembered": 16,
    }  # fmt: skip


def test_one_text_alone_has_no_other_to_swap_with(retrofit: Any, tmp_path: Path) -> None:
    alone = TokenStore.build([Document("a", TEXTS[0])], byte_tokenizer(), tmp_path / "s")
    assert only(compare(retrofit, alone, ["carry"])).control is None


def test_swapping_needs_two_rows(store: TokenStore, retrofit: Any) -> None:
    """Also where one row was asked for."""
    _, swapped = compare(retrofit, store, ["carry"], batch_size=1)
    assert swapped.evaluation.batch_size == 2


def test_a_trained_lora_stays_with_the_base(store: TokenStore) -> None:
    from peft import LoraConfig, get_peft_model

    base = llama()
    before = only(compare(base, store, ["sliding"], remembered=16)).evaluation.nll
    adapted: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model = undertow.add_recurrence(adapted, RecurrenceConfig(window=12, slots=4)).eval()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    carry, sliding = compare(model, store, ["carry", "sliding"], controls=False)
    assert sliding.evaluation.nll != pytest.approx(before, rel=1e-3)
    assert sliding.evaluation.nll != pytest.approx(carry.evaluation.nll, rel=1e-6)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained, "nothing is frozen by the way"


def test_select_and_its_control(store: TokenStore) -> None:
    chosen, chance = compare(llama(), store, ["select"], remembered=16)
    assert (chosen.way.window, chosen.way.selected, chosen.way.remembered) == (8, 8, 16)
    assert (chosen.control, chance.control) == (None, CHANCE)
    assert chance.evaluation.nll != chosen.evaluation.nll
    odd = only(compare(llama(), store, ["select"], remembered=15, controls=False))
    assert (odd.way.window, odd.way.selected) == (8, 7)


def test_a_model_without_attention_is_read_in_windows(store: TokenStore) -> None:
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1, pad_token_id=BOS, **IDS)
    model = MambaForCausalLM(config).eval()
    results = compare(model, store, ["disjoint", "overlap"], remembered=16, batch_size=1)
    for result, stride in zip(results, (16, 8), strict=True):
        assert result.evaluation.nll == pytest.approx(sum(by_hand(model, 16, stride).values()), rel=1e-5)
    with pytest.raises(Unable, match=r"sliding.*disjoint and overlap"):
        plan(model, ["sliding"])


# ---- what cannot be


def test_refusals_name_the_policy() -> None:
    base, absolute, state = llama(), gpt2(), srupp()
    with pytest.raises(Unable, match="policy carry: LlamaForCausalLM carries no state"):
        plan(base, ["carry"])
    for policy in ("sliding", "select"):
        with pytest.raises(Unable, match=f"policy {policy} needs rotary positions, and GPT2LMHeadModel has absolute"):
            plan(absolute, [policy])
        with pytest.raises(Unable, match=f"policy {policy}: SRUppForCausalLM carries a state of its own"):
            plan(state, [policy])
    with pytest.raises(ValueError, match=r"policy disjoint: window 65 needs 65 positions.* knows 64"):
        plan(absolute, ["disjoint"], remembered=65)
    with pytest.raises(ValueError, match=r"policy sliding: window 128 needs .* knows 128"):
        plan(base, ["sliding"], remembered=128)
    with pytest.raises(ValueError, match="policy everything: window 4096"):
        plan(base, ["everything"], context=4096)
    with pytest.raises(ValueError, match=r"policy overlap: .*even, not 15"):
        plan(base, ["overlap"], remembered=15)
    with pytest.raises(ValueError, match=r"policy overlap: .*even, not 15"):
        plan(state, ["overlap"], remembered=15)
    with pytest.raises(ValueError, match=r"remembers 16 positions, not 32.*--attention_window 31"):
        plan(state, ["carry"], remembered=32)
    with pytest.raises(ValueError, match=r"policy select: .*2 or more"):
        plan(base, ["select"], remembered=1)
    for name in ("remembered", "context"):
        with pytest.raises(ValueError, match=f"{name} should be at least 1, not 0"):
            plan(base, ["disjoint"], **{name: 0})
    with pytest.raises(ValueError, match=r"no policy 'slidng' \(did you mean sliding\?\)"):
        check_policies(["disjoint", "slidng"])
    assert check_policies(["sliding", "disjoint", "sliding"]) == ["sliding", "disjoint"]


def test_a_retrofit_is_what_it_was_trained_to_be(retrofit: Any) -> None:
    with pytest.raises(ValueError, match="policy carry: RecurrentForCausalLM remembers 16 positions, not 32"):
        plan(retrofit, ["carry"], remembered=32)


def test_everything_stays_within_what_the_model_knows() -> None:
    (way,) = plan(llama(), ["everything"])
    assert way.window is not None
    assert way.stride is not None
    assert 4 + way.window - 1 + way.stride <= 128
    assert way.window > 64
    (way,) = plan(gpt2(), ["everything"])
    assert (way.window, way.stride) == (64, 32), "windows that overlap, where positions are absolute"


def test_positions_of_all_policies_stand_beside_one_another(store: TokenStore) -> None:
    """Over N places, whether the window stands still, slides, or is another one altogether."""
    policies = ["disjoint", "overlap", "sliding", "select", "everything"]
    for result in compare(llama(), store, policies, remembered=32, controls=False, per_document_tokens=40):
        assert len(result.evaluation.targets_by_position) == 32
        assert sum(result.evaluation.targets_by_position) == result.evaluation.targets


def test_bad_parts(store: TokenStore) -> None:
    with pytest.raises(ValueError, match="skip_tokens should be 0 or more, not -1"):
        evaluate(llama(), store, skip_tokens=-1)
    with pytest.raises(ValueError, match="per_document_tokens should be at least 1, not 0"):
        evaluate(llama(), store, per_document_tokens=0)
    with pytest.raises(ValueError, match="no document has a token after its first 100"):
        evaluate(llama(), store, skip_tokens=100)
    with pytest.raises(ValueError, match="stride 9 is longer than the window of 8"):
        evaluate(llama(), store, window=8, stride=9)
