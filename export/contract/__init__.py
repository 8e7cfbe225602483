"""The contract between exporter, shards and front tier: the manifest, the routing rules, the repository's layout.

A leaf: standard library and pydantic only, so that every part can import it.
"""

from export.contract.errors import Stopped, UserError
from export.contract.layout import (
    RepositoryError,
    check_digest,
    check_size,
    collections,
    read_manifest,
    shard_dir,
    version_dir,
    versions,
)
from export.contract.manifest import Manifest, Shard, ShardTable, StateFile, Toolchain
from export.contract.names import PROBE_ID, check_collection_name, shard_model_name
from export.contract.pins import read_pin, write_pin
from export.contract.routing import as_unsigned, even_row_ranges, hash_shard, mix64, training_bucket
from export.contract.tables import ROUTINGS, Mpzch, Placement, Table, TrainingBuckets, Zch
from export.contract.terms import (
    INT64_MAX,
    NO_ROW,
    SENTINEL_IDS,
    Kind,
    OutOfRange,
    Remap,
    Routing,
    RowDtype,
    Runtime,
    Unknown,
)

__all__ = [
    "INT64_MAX",
    "NO_ROW",
    "PROBE_ID",
    "ROUTINGS",
    "SENTINEL_IDS",
    "Kind",
    "Manifest",
    "Mpzch",
    "OutOfRange",
    "Placement",
    "Remap",
    "RepositoryError",
    "Routing",
    "RowDtype",
    "Runtime",
    "Shard",
    "ShardTable",
    "StateFile",
    "Stopped",
    "Table",
    "Toolchain",
    "TrainingBuckets",
    "Unknown",
    "UserError",
    "Zch",
    "as_unsigned",
    "check_collection_name",
    "check_digest",
    "check_size",
    "collections",
    "even_row_ranges",
    "hash_shard",
    "mix64",
    "read_manifest",
    "read_pin",
    "shard_dir",
    "shard_model_name",
    "training_bucket",
    "version_dir",
    "versions",
    "write_pin",
]
