"""Numbers with their units, as people read them."""

from __future__ import annotations

__all__ = ["bytes_text", "fitted", "plural", "time_text"]


def time_text(seconds: float) -> str:
    """A time with its unit.

    Example:
        >>> time_text(0.0123), time_text(0.0000456), time_text(2)
        ('12.3 ms', '45.6 us', '2 s')
        >>> time_text(3605), time_text(0.9999)
        ('3,605 s', '1 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} us"


def bytes_text(number: int) -> str:
    """A size in memory with its unit.

    Example:
        >>> bytes_text(1 << 30), bytes_text(3 << 20), bytes_text(2000)
        ('1 GiB', '3 MiB', '1.95 KiB')
        >>> bytes_text(1_040_000), bytes_text(1022 << 20)
        ('1,016 KiB', '1,022 MiB')
    """
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if number >= 1 << power:
            return f"{_digits(number / (1 << power))} {unit}"
    return f"{_digits(number / 1024)} KiB"


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def plural(number: int, thing: str) -> str:
    """A number of things.

    Example:
        >>> plural(1, "actor"), plural(1234, "frame")
        ('1 actor', '1,234 frames')
    """
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def fitted(line: str, width: int) -> str:
    """A line, cut off where it is too long.

    Example:
        >>> fitted("batches of 4, 8, 12 rows", 16)
        'batches of 4,...'
    """
    return line if len(line) <= width else f"{line[: width - 3]}..."
