"""Inputs of tasks that pool share requests: a request costs about as much as an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

#: So many share a request where a client may choose: its own price does not count then, and a
#: thousand are still enough for several workers.
PACK_INPUTS: Final = 256
#: Most bytes of the inputs that a client lets share a request.
PACK_BYTES: Final = 64 * 1024

T = TypeVar("T")


def in_packs(
    items: Iterable[T], size_of: Callable[[T], int], most: int, count: int = PACK_INPUTS
) -> Iterator[list[T]]:
    """Split items into packs: inputs that share a request, or requests that share a call.

    A pack has at most ``count`` items, whose sizes add up to at most ``most``; a larger item has a
    pack of its own. The same items always make the same packs, so a caller that asks again sends
    the same requests.
    """
    pack: list[T] = []
    size = 0
    for item in items:
        more = size_of(item)
        if pack and (len(pack) == count or size + more > most):
            yield pack
            pack, size = [], 0
        pack.append(item)
        size += more
    if pack:
        yield pack
