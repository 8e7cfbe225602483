"""The contract between exporter, shards and front tier: the manifest, the routing rules, the repository's layout.

A leaf: standard library and pydantic only, so that every part can import it.
"""

from export.contract.errors import UserError
from export.contract.layout import (
    RepositoryError,
    check_size,
    collections,
    read_manifest,
    shard_dir,
    version_dir,
    versions,
)
from export.contract.manifest import (
    INT64_MAX,
    NO_ROW,
    SENTINEL_IDS,
    Manifest,
    OutOfRange,
    Placement,
    Remap,
    Routing,
    RowDtype,
    Shard,
    ShardTable,
    StateFile,
    Table,
    Toolchain,
    Unknown,
    Zch,
)
from export.contract.names import check_collection_name, shard_model_name
from export.contract.routing import as_unsigned, even_row_ranges, hash_shard, mix64

__all__ = [
    "INT64_MAX",
    "NO_ROW",
    "SENTINEL_IDS",
    "Manifest",
    "OutOfRange",
    "Placement",
    "Remap",
    "RepositoryError",
    "Routing",
    "RowDtype",
    "Shard",
    "ShardTable",
    "StateFile",
    "Table",
    "Toolchain",
    "Unknown",
    "UserError",
    "Zch",
    "as_unsigned",
    "check_collection_name",
    "check_size",
    "collections",
    "even_row_ranges",
    "hash_shard",
    "mix64",
    "read_manifest",
    "shard_dir",
    "shard_model_name",
    "version_dir",
    "versions",
]
