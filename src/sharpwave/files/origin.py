"""Origin: where a call that must be executed once comes from."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Origin"]

_TOKEN_BYTES = 16


class Origin(NamedTuple):
    """A call of another process, which may be sent again: stores remember it and execute it once."""

    token: bytes  # of the client, 16 random bytes
    number: int  # of the call; a client gives no number twice
    oldest: int  # the client asks for no number below this one again

    def to_json(self) -> list[Any]:
        return [self.token.hex(), self.number, self.oldest]

    @classmethod
    def read(cls, said: Any) -> Origin:
        """Raises:
        ValueError, TypeError: It is not what ``to_json`` gave.
        """
        token, number, oldest = said
        made = cls(bytes.fromhex(token), number, oldest)
        if len(made.token) != _TOKEN_BYTES or not _is_count(number) or not _is_count(oldest) or oldest > number:
            raise ValueError(
                f"origin: expected {_TOKEN_BYTES} bytes as hex, a number and the oldest, got {said!r:.100}"
            )
        return made


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
