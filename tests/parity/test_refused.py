"""What TorchRec accepts and the suite leaves out is refused by name."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from export.contract import TrainingBuckets
from export.errors import ExportError
from export.maps import read_map
from export.source import MapPiece
from tests.modules import hash_zch_module

BUCKETS = TrainingBuckets(input_hash_size=0, row_edges=(0, 6, 12, 18, 24), floor_modulo=True)


def test_no_bag_on_several_ranks_answers_with_each_ranks_own_first_row_and_is_refused():
    whole = hash_zch_module(24, buckets=4, fallback="no_bag")
    pieces = [whole.rebuild_with_output_id_range((start, start + 12)).eval() for start in (0, 12)]
    missing = [
        piece.remap({"ids": JaggedTensor(values=torch.tensor([bucket]), lengths=torch.tensor([1]))})["ids"].values()
        for piece, bucket in zip(pieces, (0, 2), strict=True)
    ]
    assert torch.cat(missing).tolist() == [0, 12]
    parts = [MapPiece(row_start=12 * at, row_stop=12 * at + 12, module=piece) for at, piece in enumerate(pieces)]
    for held in (parts, parts[1:]):
        with pytest.raises(ExportError, match="table user: trained on several ranks with no_bag"):
            read_map("user", held, BUCKETS)
    read_map("user", [MapPiece(row_start=0, row_stop=24, module=whole)], BUCKETS)
