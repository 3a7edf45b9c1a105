# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory as people write them: 15.35GiB, 180GB."""

import re
from decimal import Decimal

_UNITS_BYTES = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(-?\d+(?:\.\d+)?|-?\.\d+)\s*([^\W\d]*)\s*")
_EXAMPLE = "such as 15.35GiB or 180GB"


def parse_bytes(text: str, *, least: int = 1) -> int:
    """Whole bytes of an amount of memory; a number alone is bytes. ValueError for fewer than `least`, 1 or 0.

    Units are B, KB..TB (powers of 1000) and KiB..TiB (powers of 1024), in upper or lower case.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory: give a number and a unit, {_EXAMPLE}")
    number, unit = match.groups()
    factor = {name.lower(): size for name, size in _UNITS_BYTES.items()}.get(unit.lower() or "b")
    if factor is None:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}: use one of {', '.join(_UNITS_BYTES)}")
    size = int(Decimal(number) * factor)
    if size < least:
        raise ValueError(f"{text!r} is {size} bytes: give a positive amount of memory, {_EXAMPLE}")
    return size


def human(num_bytes: int) -> str:
    """An amount for reading, in powers of 1000 as memory is sold: 141 GB, 16.48 GB, 44.5 MB, 640 B."""
    for unit, size, digits in (("GB", 10**9, 2), ("MB", 10**6, 1)):
        if abs(num_bytes) >= size:
            number = f"{num_bytes / size:,.{digits}f}"
            return f"{number.rstrip('0').rstrip('.')} {unit}"
    return f"{num_bytes:,} B"
