"""A set of line numbers that takes one bit for each line."""

from __future__ import annotations


class Marks:
    """Numbers from 0 up; memory follows the largest, an eighth of a byte each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Mark a number; False where it was marked before."""
        if number in self:
            return False
        at = number >> 3
        if at >= len(self._bits):
            # More than is needed, so that a growing set is not copied all the time.
            self._bits.extend(bytes(at + at // 4 + 64 - len(self._bits)))
        self._bits[at] |= 1 << (number & 7)
        self._count += 1
        return True
