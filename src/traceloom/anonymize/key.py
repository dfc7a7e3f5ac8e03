"""Pseudonyms: the same word for the same thing, and no way back without the key."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from traceloom.errors import InputError, OutputError
from traceloom.files import note_input

# Sixteen letters without vowels, c, d, l and w: they spell no word, and none of the marks by which names are told.
ALPHABET = "bfghjkmnpqrstvxz"
LETTERS = 10
KEY_BYTES = 32
_LEAST_KEY = 16
_MOST_KEY = 1 << 16
_LETTERS_OF_BYTE = tuple(ALPHABET[byte >> 4] + ALPHABET[byte & 15] for byte in range(256))


class Key:
    """Makes pseudonyms by HMAC-SHA-256.

    The same text gives the same pseudonym on all ranks, in all files and, with the same key, in all runs.

    Args:
        secret: The key; whoever has it can test guesses of names.
    """

    def __init__(self, secret: bytes) -> None:
        self._base = hmac.new(secret, digestmod=hashlib.sha256)

    def digest(self, label: str, text: str) -> bytes:
        """32 bytes for a text; `label` keeps kinds of texts apart."""
        mac = self._base.copy()
        mac.update(label.encode() + b"\0" + text.encode("utf-8", "surrogatepass"))
        return mac.digest()

    def letters(self, text: str, label: str = "name") -> str:
        """Ten letters (40 bits)."""
        return "".join(_LETTERS_OF_BYTE[byte] for byte in self.digest(label, text)[: LETTERS // 2])

    def number(self, text: str, label: str = "number") -> int:
        """A number of nine digits, never 0 in front."""
        return 10**8 + int.from_bytes(self.digest(label, text)[:8], "big") % (9 * 10**8)


def random_key() -> Key:
    """A key that nobody keeps."""
    return Key(secrets.token_bytes(KEY_BYTES))


def read_key(path: Path) -> tuple[Key, bool]:
    """The key in a file; where there is no file, a new key is put there for its owner alone.

    Returns:
        The key, and whether it is new.

    Raises:
        InputError: slug `bad-key`: too short or too long to be a key, or unreadable.
        OutputError: slug `cannot-write`: a new one cannot be kept.
    """
    try:
        with path.open("rb") as file:
            secret = file.read(_MOST_KEY + 1)
    except FileNotFoundError:
        secret = secrets.token_hex(KEY_BYTES).encode() + b"\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secret)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(f"the key cannot be kept in `{path}`: {reason}", slug="cannot-write") from error
        note_input(path)
        return Key(secret), True
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"the key cannot be read: {reason}", slug="bad-key", where=str(path)) from error
    if not _LEAST_KEY <= len(secret.strip()) <= _MOST_KEY:
        raise InputError(
            f"expected a key of {_LEAST_KEY} to {_MOST_KEY} bytes, got {len(secret)}",
            slug="bad-key",
            where=str(path),
            hint="name a file that is not there yet, and a good key is made",
        )
    return Key(secret), False
