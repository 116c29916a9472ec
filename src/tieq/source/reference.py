"""The float reference model in transformers, and what its modules say about the weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import RefusedError
from tieq.records import Matrix
from tieq.source.families import family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from tieq.source.base import ModelSource


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What a causal language model is made of, from its configuration alone.

    Attributes:
        shapes: canonical tensor name to shape, as a checkpoint stores it.
        lookup: name of the lookup table.
        logits: name of the logits matrix.
        body: every other weight matrix that multiplies hidden states.
        tied_by_default: whether transformers ties the two for this configuration.
        parameters: parameters, counting a tied table once.
    """

    shapes: dict[str, tuple[int, ...]]
    lookup: str
    logits: str
    body: tuple[Matrix, ...]
    tied_by_default: bool
    parameters: int


def make_config(config: dict[str, Any]) -> PretrainedConfig:
    """Build the transformers configuration object of a plain dictionary.

    Raises:
        RefusedError: if transformers does not know the model type, which then would need remote code.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise RefusedError(
            f"transformers does not know the model type '{model_type}', and code from a checkpoint is never run.",
            where="config.json",
            todo="Use a model type that transformers implements.",
        )
    settings = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        made: PretrainedConfig = CONFIG_MAPPING[model_type](**settings)
    except Exception as error:  # configuration classes raise whatever their checks raise
        raise _unusable(error) from error
    return made


def _unusable(error: Exception) -> RefusedError:
    return RefusedError(
        f"transformers makes no language model of this configuration ({error}).",
        where="config.json",
        todo="Check the configuration.",
    )


def inventory(config: dict[str, Any]) -> Inventory:
    """List the model's tensors and roles without allocating any of them."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    made = make_config(config)
    try:
        with torch.device("meta"), _quiet():
            model = AutoModelForCausalLM.from_config(made)
    except Exception as error:  # model classes raise whatever their constructors raise
        raise _unusable(error) from error
    lookup_module, logits_module = model.get_input_embeddings(), model.get_output_embeddings()
    if lookup_module is None or logits_module is None:
        raise RefusedError("the model has no lookup or no logits module.", where=str(config.get("model_type")))
    by_module = {module: name for name, module in model.named_modules()}
    body = []
    for name, module in model.named_modules():
        if module in (lookup_module, logits_module):
            continue
        if isinstance(module, torch.nn.Linear):
            body.append(Matrix(f"{name}.weight", module.out_features, module.in_features))
        elif isinstance(module, Conv1D):
            rows = module.weight.shape[1]
            body.append(Matrix(f"{name}.weight", rows, module.weight.shape[0], transposed=True))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return Inventory(
        shapes=shapes,
        lookup=by_module[lookup_module] + ".weight",
        logits=by_module[logits_module] + ".weight",
        body=tuple(body),
        tied_by_default=lookup_module.weight is logits_module.weight or _ties(made),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _ties(config: PretrainedConfig) -> bool:
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def default_tie(model_type: str) -> bool:
    """What the architecture assumes when a configuration does not say whether the table is tied."""
    known = family(model_type).tie_default
    return _ties(make_config({"model_type": model_type})) if known is None else known


def model_documents(config: dict[str, Any]) -> dict[str, str]:
    """``config.json`` and ``generation_config.json`` as transformers writes them beside a model."""
    from transformers import GenerationConfig

    made = make_config(config)
    if made.architectures is None and (known := family(str(config["model_type"])).architecture):
        made.architectures = [known]
    with _quiet():
        generation = GenerationConfig.from_model_config(made)
        return {"config.json": made.to_json_string(), "generation_config.json": generation.to_json_string()}


def rotary_frequencies(config: Any, base: float | None = None) -> tuple[str, NDArray[np.float32], float]:
    """Kind, frequencies ``[rotary columns / 2]`` and scale of a configuration's rotary position embedding.

    ``base`` asks for plain ones of another base (Gemma 3's sliding layers).
    """
    import copy

    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = getattr(config, "rope_scaling", None) or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if base is not None:
        kind, config = "default", copy.deepcopy(config)
        config.rope_theta, config.rope_scaling = base, None
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return kind, frequencies.float().numpy(), float(scale)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class ReferenceModel:
    """The float32 model in transformers; ``module`` is the torch module itself, for tracing and hooks."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits ``[length, vocab]`` of one sequence ``[length]``."""
        import torch

        with torch.no_grad():
            found = self.module(torch.from_numpy(ids)[None], use_cache=False).logits[0]
        values: NDArray[np.float32] = found.numpy()
        return values


def load_model(source: ModelSource, *, tied: bool, table: str | None = None) -> ReferenceModel:
    """Load the float32 reference model.

    Args:
        source: where the tensors come from; each is read once.
        tied: whether lookup and logits share one parameter.
        table: canonical name of the tensor that is the shared table.

    Raises:
        RefusedError: if a parameter is missing (nothing is ever initialized at random) or has another shape.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    config = make_config({**source.config, "tie_word_embeddings": tied})
    # Torch's own attention drops the cap on the scores without a word.
    attention = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    with no_init_weights(), _quiet():
        model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32, **attention)
    available = set(source.names())
    lookup, logits = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        stored = name
        if tied and table is not None and (parameter is lookup or parameter is logits):
            stored = table
        if stored not in available:
            raise RefusedError(
                f"the tensor '{name}' is missing, and a random one is never used instead.",
                where=str(source.path),
                todo="Download the checkpoint again.",
            )
        values = torch.from_numpy(np.require(source.read(stored), requirements=["C", "W"]))
        if values.shape != parameter.shape:
            raise RefusedError(
                f"tensor '{name}' has shape {list(values.shape)} where {list(parameter.shape)} is expected.",
                where=str(source.path),
                todo="The configuration and the weights do not belong together.",
            )
        parameter.data = values
    model.eval()
    return ReferenceModel(model)
