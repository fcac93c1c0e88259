"""Loading causal language models, and making sure beforehand that a model is one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from undertow.data.tokenizer import HUB_PREFIX

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Bidirectional unless is_decoder is set, and their attention modules do not say which.
_ENCODERS = {"big_bird", "megatron-bert", "reformer", "rembert", "roformer", "xlm", "xlnet"}


def read_config(source: str, name: str) -> PreTrainedConfig:
    """The configuration of a model in a folder or of ``hub:owner/name``.

    Raises:
        ValueError: of a model that transformers does not know.
        OSError: there is none, or the hub does not answer.
    """
    from transformers import AutoConfig

    import undertow.models
    import undertow.retrofit.modeling  # noqa: F401 (both let the Auto classes know ours)

    hub = source.startswith(HUB_PREFIX)
    try:
        return AutoConfig.from_pretrained(
            source.removeprefix(HUB_PREFIX), local_files_only=not hub, trust_remote_code=False
        )
    except OSError as error:
        raise OSError(_hub_trouble(source, error) if hub else f"{name}: {first_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name}: transformers does not know this model ({first_line(error)})") from error


def check_causal(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """Make sure, from its configuration alone, that a model is a causal language model.

    Args:
        config: the model's configuration.
        name: what to call it in errors.

    Returns:
        The model without weights (on the ``meta`` device), for its shapes.

    Raises:
        ValueError: an encoder-decoder, an encoder, or no language model; the reason is named.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    kind = config.model_type
    if kind == "undertow_recurrent":
        known: Any = getattr(config, "base", None) or {}
        raise ValueError(
            f"{name} has a recurrence already, on the base {known.get('name')}; load_recurrent loads it as it is"
        )
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} cannot be a base: it is an encoder-decoder ({kind}), whose decoder needs an encoder's output; "
            "a causal language model is needed"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{name} cannot be a base: {kind} is not a causal language model")
    try:
        with quiet(), torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except Exception as error:  # of many kinds: settings that do not go together, a library that is not installed
        raise ValueError(
            f"{name} cannot be a base: transformers does not build a {kind} from its configuration "
            f"({first_line(error)})"
        ) from error
    # The modules say it where the configuration is not to be trusted: is_decoder is false for GPT-NeoX too. A model
    # that also has an encoder for pictures has modules of both kinds.
    says = {module.is_causal for module in skeleton.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    if says == {False} or (kind in _ENCODERS and not getattr(config, "is_decoder", False)):
        raise ValueError(
            f"{name} cannot be a base: it is an encoder ({kind}), which sees later tokens too; "
            "a causal language model is needed"
        )
    return skeleton


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Make sure that a model has an embedding for every id that a tokenizer gives.

    Raises:
        ValueError: it has fewer.
    """
    highest = max(tokenizer.get_vocab().values(), default=-1)
    embedding: Any = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    if highest >= rows:
        raise ValueError(
            f"{name}: the tokenizer does not match the model: it gives ids up to {highest:,}, and the model knows "
            f"{rows:,} (0 to {rows - 1:,})"
        )


def load_causal_lm(source: str, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A saved causal language model from a folder or ``hub:owner/name``, complete or not at all.

    Raises:
        ValueError: weights that are damaged, missing, too many, or of other shapes than the configuration asks for.
        OSError: there are none, or the hub does not answer.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    import undertow.models
    import undertow.retrofit.modeling  # noqa: F401 (both let the Auto classes know ours)

    hub = source.startswith(HUB_PREFIX)
    place = source.removeprefix(HUB_PREFIX)
    try:
        with contextlib.nullcontext() if hub else quiet():  # a download is worth a bar
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place,
                dtype=dtype or torch.float32,
                local_files_only=not hub,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise ValueError(f"{place}: the saved weights are damaged or cut short ({error})") from error
    except RuntimeError as error:  # shapes, which transformers tells in a table
        raise ValueError(f"{place}: the weights do not have the shapes that its config.json asks for") from error
    except OSError as error:
        raise OSError(_hub_trouble(source, error) if hub else f"{place}: {first_line(error)}") from error
    model, found = loaded
    check_complete(found, place)
    return model


def check_complete(found: dict[str, Any], place: str) -> None:
    """Refuse a model of which a part was left at random, or whose weights were partly left out."""
    for kind in ("missing", "unexpected"):
        if names := sorted(found[f"{kind}_keys"]):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{place}: the weights do not fit the configuration: {kind} {', '.join(names[:3])}{more}")


def first_line(error: BaseException) -> str:
    """What an error says, cut to a line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _hub_trouble(source: str, error: BaseException) -> str:
    return f"the Hugging Face hub gives no model {source.removeprefix(HUB_PREFIX)}: {first_line(error)}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from drawing bars and from warning about what is checked here, with an error."""
    import transformers.modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    own_bar = getattr(gguf_reader, "tqdm", None)  # not one of those that the switch below turns off
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if own_bar is not None:
        gguf_reader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if own_bar is not None:
            gguf_reader.tqdm = own_bar
