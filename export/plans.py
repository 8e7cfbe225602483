"""Owns what a plan says, and plan.yaml; must not know a module's tables.

::

    shards: 3
    devices: [cpu, cuda:0, cuda:1]                   # or one for all; cpu if left out
    tables:
      user: {routing: hash}                          # managed collision: any number of shards, even load
      session: {routing: training, rows: [8, 0, 4]}  # managed collision: whole training buckets; without rows, evenly
      item: {shard: 1}                               # the whole table on one shard
      category: {rows: [4, 3, 3]}                    # rows of each shard
      city: {rows: [[2, 6], [0, 5]]}                 # the same by [shard, rows], in row order
      brand: {columns: [[1, 16], [0, 8], [1, 8]]}    # [shard, columns], in column order; a shard as often as you like
      country: {shards: all}                         # a copy on each; or the shards that have one

A table that is left out gets its kind's default: even rows, ``hash`` (MCH), or ``training`` (MPZCH).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from export.contract import Routing
from export.contract.terms import Strict
from export.errors import ExportError
from export.strict_yaml import load_strict

Pieces = tuple[tuple[int, int], ...]
"""(shard, size) in the order of the rows or columns."""

_OPTIONS: Mapping[str, Sequence[Routing]] = {
    "shard": (Routing.TABLE,),
    "rows": (Routing.ROWS, Routing.TRAINING),
    "columns": (Routing.COLUMNS,),
    "shards": (Routing.REPLICATED,),
}
"""Which routings each option belongs to; alone, it means the first."""


def _check_cut(value: object) -> object:
    """One line for the two ways to write a cut; pydantic would name both and the faults of each."""
    items = list(value) if isinstance(value, (list, tuple)) else []
    sizes = bool(items) and all(_is_count(item) for item in items)
    pairs = bool(items) and all(
        isinstance(item, (list, tuple)) and len(item) == 2 and all(map(_is_count, item)) for item in items
    )
    if not sizes and not pairs:
        raise ValueError(
            f"{value!r}: write a size for each shard, [4, 3, 3], or [shard, size] in order, [[2, 6], [0, 5]]"
        )
    return tuple(items) if sizes else tuple(tuple(item) for item in items)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


Cut = Annotated[tuple[int, ...] | Pieces, BeforeValidator(_check_cut)]
"""Sizes, one for each shard, or pieces."""

Whole = Annotated[int, Field(ge=0, strict=True)]
"""A number, and not ``true`` or text that could be read as one."""

DEVICE = r"^(cpu|cuda:(0|[1-9][0-9]{0,3}))$"
DEVICE_RULE = "use cpu or cuda:N, N from 0 to 9999"
Device = Annotated[str, Field(pattern=DEVICE)]


Count = Annotated[int, Field(ge=0, strict=True)]
"""A number, not what could be read as one: YAML's ``true`` is no shard."""


class TablePlan(Strict):
    """How one table is cut; options that its routing does not use must be left out."""

    model_config = ConfigDict(strict=False)  # YAML knows neither enums nor tuples

    routing: Routing | None = None
    """None: what the option that is given means, or the default of the table's kind."""
    shard: Whole | None = None
    """``table``: the shard that holds it."""
    rows: Cut | None = None
    """``rows`` and ``training``: rows on each shard, 0 allowed. None: even ranges as TorchRec's row-wise sharding cuts
    them, or training's buckets spread evenly."""
    columns: Cut | None = None
    """``columns``: columns on each shard."""
    shards: tuple[Whole, ...] | Literal["all"] | None = None
    """``replicated``: the shards that hold a copy. None: all."""

    @property
    def chosen_routing(self) -> Routing | None:
        """The routing that is named, or meant by the option that is given."""
        return self.routing or next((_OPTIONS[option][0] for option in self._given), None)

    @property
    def _given(self) -> tuple[str, ...]:
        return tuple(option for option in _OPTIONS if getattr(self, option) is not None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        routing = self.chosen_routing
        for option in self._given:
            if routing not in _OPTIONS[option]:
                owners = " or ".join(f"'{owner}'" for owner in _OPTIONS[option])
                raise ValueError(f"'{option}' belongs to routing {owners}, not '{routing}'")
        for option in ("shard", "columns"):
            if routing in _OPTIONS[option] and option not in self._given:
                raise ValueError(f"routing '{routing}' needs '{option}'")
        return self


class Plan(Strict):
    """A whole plan; tables that it does not name get their kind's default."""

    model_config = ConfigDict(strict=False)

    shards: Annotated[int, Field(ge=1, strict=True)]
    devices: tuple[Device, ...] = ()
    """Where each shard's state lies: ``cpu`` or ``cuda:N``, one for each shard, or one for all. None: the CPU."""
    tables: dict[str, TablePlan] = Field(default_factory=dict)

    @field_validator("devices", mode="before")
    @classmethod
    def _one_for_all(cls, value: object, info: ValidationInfo) -> object:
        return [value] * info.data.get("shards", 1) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        if self.devices and len(self.devices) != self.shards:
            raise ValueError(
                f"devices names {len(self.devices)}, there are {self.shards} shards; name one for all or each"
            )
        return self


def read_plan(path: Path) -> Plan:
    """Read plan.yaml.

    Raises:
        ExportError: It cannot be read, is not YAML, gives a key twice, or breaks a rule; names the field.
    """
    try:
        document = load_strict(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ExportError(f"plan {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ExportError(f"plan {path}: not UTF-8 text") from exc
    except ValueError as exc:
        raise ExportError(f"plan {path}: not YAML as a plan has it: {exc}") from exc
    return make_plan(document, f"plan {path}")


def make_plan(document: object, place: str = "plan") -> Plan:
    """A plan from its parts, as plan.yaml has them.

    Raises:
        ExportError: It breaks a rule; names ``place`` and the field.
    """
    try:
        return Plan.model_validate(document)
    except ValidationError as exc:
        faults = "; ".join(_fault(cast("dict[str, Any]", error)) for error in exc.errors())
        raise ExportError(f"{place}: {faults}") from exc


def _fault(error: Mapping[str, Any]) -> str:
    field = ".".join(map(str, error["loc"])) or "plan"
    if field.startswith("devices.") and error["type"] == "string_pattern_mismatch":
        return f"{field}: {error['input']!r}: {DEVICE_RULE}"
    if error["type"] == "int_type":
        return f"{field}: {error['input']!r}: use a whole number"
    if (field, error["type"]) == ("shards", "missing"):
        return "shards: missing; write how many there are, shards: 2"
    return f"{field}: {error['msg'].removeprefix('Value error, ')}"
