"""Owns the units in which shards hold rows (docs/adr/0010), and what a plan is told when they are short.

Must not decide where a table lies, or what a shard holds (``export.shard_state``).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from export.contract import RowDtype
from export.errors import ExportError
from export.state import PlacedTable

_log = logging.getLogger(__name__)

_SHORT = 16
"""Numbers in a unit below which reading one costs more than the numbers in it: 16 of FP32 are a cache line."""
_SCALE_BYTES = 8
"""FP32 scale and bias of an int8 unit."""


def unit_of(widths: Iterable[int], dim: int) -> int:
    """Numbers in a unit of a shard that holds so many of each of its tables; ``dim`` where it holds no table."""
    return math.gcd(*widths) or dim


def check_units(tables: Sequence[PlacedTable], row_dtype: RowDtype) -> None:
    """Warn of plans that cut rows into short units, and refuse int8 where it takes more bytes than the trainer's numbers.

    Raises:
        ExportError: int8 would make a shard's rows larger than FP32; names the shard and its tables.
    """
    alike: dict[tuple[int, str], list[int]] = {}
    for shard, widths in sorted(_widths_by_shard(tables).items()):
        unit = unit_of(widths.values(), 0)
        held = ", ".join(f"{table} ({width})" for table, width in widths.items())
        if row_dtype is RowDtype.INT8 and unit + _SCALE_BYTES > 4 * unit:
            advice = "cut columns in multiples of 16, or use fp16" if unit < max(widths.values()) else "use fp16"
            raise ExportError(
                f"row_dtype 'int8': shard {shard} holds rows in units of {_numbers(unit)}, the common divisor of its tables' "
                f"columns: {held}; with its scale and bias a unit takes {unit + _SCALE_BYTES} bytes, as fp32 {4 * unit}; "
                f"{advice}"
            )
        if unit < min(_SHORT, max(widths.values())):
            alike.setdefault((unit, held), []).append(shard)
    for (unit, held), shards in alike.items():
        _log.warning(
            "shard %s: rows lie in units of %s, the common divisor of its tables' columns: %s; lookups are slow and int8 is "
            "large, so cut columns in multiples of 16, or all in one width",
            ", ".join(map(str, shards)),
            _numbers(unit),
            held,
        )


def _numbers(count: int) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


def _widths_by_shard(tables: Sequence[PlacedTable]) -> Mapping[int, Mapping[str, int]]:
    widths: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for table in tables:
        for piece in table.placements:
            first, last = piece.columns(table.source.dim)
            held = widths[piece.shard]
            held[table.source.name] = held.get(table.source.name, 0) + last - first
    return widths
