"""Run the reference model with another table in one role or both: lookup by a body pass, logits on hidden states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import RefusedError
from tieq.source.reference import ReferenceModel

Table = NDArray[np.float32]


def hidden_states(model: ReferenceModel, ids: NDArray[np.int64], lookup: Table | None = None) -> NDArray[np.float32]:
    """What the logits role reads (after the final norm), ``[length, columns]``, of one sequence ``[length]``.

    Args:
        model: the float model.
        ids: tokens.
        lookup: table ``[rows, columns]`` that is looked up in place of the model's own.
    """
    import torch

    with torch.no_grad(), with_lookup(model, lookup):
        found = body_of(model)(torch.from_numpy(ids)[None], use_cache=False).last_hidden_state[0]
    values: NDArray[np.float32] = found.numpy()
    return values


def logits_of(model: ReferenceModel, hidden: NDArray[np.float32], logits: Table | None = None) -> NDArray[np.float32]:
    """Logits ``[length, rows]`` of hidden states ``[length, columns]``, with the model's scaling, softcap and bias.

    Args:
        model: the float model.
        hidden: what :func:`hidden_states` returned.
        logits: table ``[rows, columns]`` that scores in place of the model's own.
    """
    import torch

    ids = torch.zeros((1, len(hidden)), dtype=torch.int64)
    with torch.no_grad(), _table(model.module.get_output_embeddings(), logits), _body_gives(body_of(model), hidden):
        found = model.module(ids, use_cache=False).logits[0]
    values: NDArray[np.float32] = found.numpy()
    return values


def role_tables(model: ReferenceModel) -> tuple[Table, Table]:
    """The model's own tables, lookup and logits, ``[rows, columns]`` float32; one and the same array where tied."""
    lookup: Any = model.module.get_input_embeddings().weight
    logits: Any = model.module.get_output_embeddings().weight
    first: Table = lookup.detach().numpy()
    second: Table = first if logits is lookup else logits.detach().numpy()
    return first, second


def body_of(model: ReferenceModel) -> Any:
    """The module between the roles: ids in, hidden states after the final norm out."""
    module = model.module
    # Gemma 3's text model names no base model of its own, in which case transformers returns the whole model.
    return module.base_model if module.base_model is not module else module.get_decoder()


def blocks_of(model: ReferenceModel) -> list[Any]:
    """The decoder blocks: the outermost list of modules in the body (a block may hold lists of its own, of experts).

    Raises:
        RefusedError: if the body has no list of modules.
    """
    import torch

    lists = [
        (name.count("."), -len(module), list(module))
        for name, module in body_of(model).named_modules()
        if isinstance(module, torch.nn.ModuleList)
    ]
    if not lists:
        raise RefusedError("the model has no list of decoder blocks.", where=type(model.module).__name__)
    return min(lists, key=lambda entry: entry[:2])[2]


def with_lookup(model: ReferenceModel, lookup: Table | None) -> contextlib.AbstractContextManager[None]:
    """While it lasts, the model looks tokens up in another table ``[rows, columns]`` (None: its own)."""
    return _table(model.module.get_input_embeddings(), lookup)


@contextlib.contextmanager
def with_weights(model: ReferenceModel, matrices: Iterable[tuple[str, bool, Table]]) -> Iterator[None]:
    """While it lasts, parameters of the model have other values.

    Args:
        model: the float model.
        matrices: parameter name, whether it is stored as ``[columns, rows]``, and values ``[rows, columns]``.
    """
    import torch

    own: list[tuple[Any, Any]] = []
    try:
        for name, transposed, values in matrices:
            parameter = model.module.get_parameter(name)
            own.append((parameter, parameter.data))
            parameter.data = torch.from_numpy(np.ascontiguousarray(values.T if transposed else values))
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


@contextlib.contextmanager
def _table(module: Any, table: Table | None) -> Iterator[None]:
    """Give the module another weight; a tied partner keeps the old one, because the parameter object is replaced."""
    import torch

    own = module.weight
    if table is not None:
        module.weight = torch.nn.Parameter(torch.from_numpy(np.require(table, requirements="W")), requires_grad=False)
    try:
        yield
    finally:
        module.weight = own


@contextlib.contextmanager
def _body_gives(body: Any, hidden: NDArray[np.float32]) -> Iterator[None]:
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    states: Any = torch.from_numpy(hidden)[None]
    known = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)
    body.forward = lambda *args, **kwargs: known
    try:
        yield
    finally:
        del body.forward
