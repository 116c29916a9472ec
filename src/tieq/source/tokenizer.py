"""The tokenizer of a model folder: ids, beginning-of-sequence, and which ids exist."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from tieq.errors import RefusedError, TieqError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# Enough for most text and tokenizers, so that one look is.
_CHARACTERS_A_TOKEN = 6


class TextTokenizer:
    """Turns text into ids with the folder's own tokenizer.

    Raises:
        TieqError: if the folder holds no tokenizer that can be loaded.
    """

    def __init__(self, folder: Path | None, where: str) -> None:
        if folder is None:
            raise TieqError(
                "no tokenizer was found, so text cannot be turned into tokens.",
                where=where,
                todo="Put the tokenizer's files beside the weights.",
            )
        self.folder = folder
        self._tokenizer: Any = self._load(folder)

    @staticmethod
    def _load(folder: Path) -> Any:
        if (folder / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            try:
                return Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception as error:  # the tokenizers library raises plain Exception
                raise TieqError(f"cannot be loaded ({error}).", where=str(folder / "tokenizer.json")) from error
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(folder), use_fast=True, trust_remote_code=False)._tokenizer
        except Exception as error:  # whatever the slow tokenizer's libraries raise
            raise TieqError(f"its tokenizer cannot be loaded ({error}).", where=str(folder)) from error

    @functools.cached_property
    def sha256(self) -> str:
        """Digest of everything that its ids depend on."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_first(self, text: str, start: int, count: int) -> tuple[list[int], int]:
        """The first ``count`` ids of ``text[start:]`` (fewer where it ends) and the position after them."""
        window = max(64, _CHARACTERS_A_TOKEN * count)
        while True:
            encoded = self._tokenizer.encode(text[start : start + window], add_special_tokens=False)
            # The window's last token may have been cut short.
            if len(encoded.ids) > count or start + window >= len(text):
                break
            window *= 2
        ids = list(encoded.ids[:count])
        return ids, start + (encoded.offsets[len(ids) - 1][1] if ids else 0)

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return str(self._tokenizer.decode(ids))

    @functools.cached_property
    def ids(self) -> frozenset[int]:
        """Every id that the tokenizer can emit, added tokens included."""
        return frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that stand for no text: beginnings, ends, padding, turns."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @functools.cached_property
    def bos(self) -> int | None:
        """Id that begins every sequence, where the tokenizer itself puts one; None elsewhere."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        special = self._tokenizer.encode("a", add_special_tokens=True).ids
        if len(special) > len(plain) and special[1 : 1 + len(plain)] == plain:
            return int(special[0])
        settings = self.folder / "tokenizer_config.json"
        if settings.exists():
            try:
                content = json.loads(settings.read_text(encoding="utf-8"))
                token = content.get("bos_token")
                token = token.get("content") if isinstance(token, dict) else token
                if content.get("add_bos_token") and token:
                    number = self._tokenizer.token_to_id(token)
                    return None if number is None else int(number)
            except (ValueError, AttributeError, TypeError) as error:
                raise TieqError(f"cannot be used ({error}).", where=str(settings)) from error
        return None


def count_ids(folder: Path, where: str) -> int:
    """Number of ids that a folder's tokenizer can emit; read off ``tokenizer.json``, which is faster than loading it.

    Raises:
        TieqError: if the tokenizer cannot be loaded.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        entries = content["model"]["vocab"]
        ids = set(entries.values()) if isinstance(entries, dict) else set(range(len(entries)))
        ids |= {token["id"] for token in content["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError):
        return len(TextTokenizer(folder, where).ids)
    return len(ids)


def check_rows(tokenizer: TextTokenizer, rows: int, where: str) -> None:
    """Refuse a tokenizer that emits ids beyond the table.

    Raises:
        RefusedError: naming the ids.
    """
    beyond = sorted(number for number in tokenizer.ids if number >= rows or number < 0)
    if beyond:
        shown = ", ".join(map(str, beyond[:8])) + (" ..." if len(beyond) > 8 else "")
        raise RefusedError(
            f"the tokenizer emits {len(beyond)} ids that the table of {rows} rows does not have: {shown}.",
            where=where,
            todo="Resize the embedding (`resize_token_embeddings`) or use the tokenizer the model was trained with.",
        )
