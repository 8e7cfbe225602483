"""Trainer side: turns a TorchRec collection into a Triton model repository.

The only part that imports torchrec. ``export.contract`` is the leaf that every other part may import, so importing
this package must stay free of heavy imports: the public functions are loaded when first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.collection import export_collection, export_delta, export_sharded, verify_version
    from export.publisher import DeltaPublisher

__all__ = ["DeltaPublisher", "export_collection", "export_delta", "export_sharded", "verify_version"]


def __getattr__(name: str) -> Any:
    if name == "DeltaPublisher":
        from export.publisher import DeltaPublisher

        return DeltaPublisher
    if name in __all__:
        from export import collection

        return getattr(collection, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
