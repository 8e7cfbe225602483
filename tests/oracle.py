"""Expected answers from TorchRec's own modules, table by table and by name; knows nothing of artifacts, shards or requests.

The collection's own forward is no oracle: it splits a request in config order but runs its modules in dict order, keeps
the first request's key order, and fails on an empty batch. So each table is asked alone. A table that W ranks trained is
as many modules: FBGEMM's own ``block_bucketize_sparse_features`` says which of them an id belongs to.

Must not import ``service`` or anything of ``export`` that computes answers.

Shape suffixes: N ids, R rows of a table, D embedding dimension.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

INT64_MAX = 2**63 - 1
NO_ROW = -1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What N ids of one table get."""

    embeddings_ND: torch.Tensor
    row_ids_N: torch.Tensor
    hits_N: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TableOracle:
    """One trained table; ``pieces`` are the collision modules of the ranks that trained it, none for a plain table."""

    weight_RD: torch.Tensor
    pieces: Sequence[ManagedCollisionModule] = ()
    zero: bool = False
    """Serve ids without a row as zeros: ``unknown=zero``, and ``out_of_range=zero`` of plain tables."""
    _asked: list[ManagedCollisionModule] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        for piece in self.pieces:
            module = copy.deepcopy(piece)
            # On CPU an MPZCH module with an eviction policy answers in inference mode only.
            module.reset_inference_mode()
            self._asked.append(module.eval())

    @torch.no_grad()
    def look_up(self, ids_N: torch.Tensor) -> Answer:
        """Answer ids INT64 [N], before any input hash."""
        if not self._asked:
            hits_N = (ids_N >= 0) & (ids_N < len(self.weight_RD))
            rows_N = torch.where(hits_N, ids_N, NO_ROW)
        else:
            rows_N, hits_N = self._remap(ids_N)
            if self.zero:
                rows_N = torch.where(hits_N, rows_N, NO_ROW)
        looked_up_ND = torch.nn.functional.embedding(rows_N.clamp(min=0), self.weight_RD).float()
        embeddings_ND = torch.where((rows_N == NO_ROW).unsqueeze(1), 0.0, looked_up_ND)
        return Answer(embeddings_ND=embeddings_ND, row_ids_N=rows_N, hits_N=hits_N)

    def _remap(self, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._asked[0]
        if not ids_N.numel():
            return ids_N, ids_N.bool()
        hashed_N = module.preprocess(_features(ids_N.clone()))["ids"].values()
        if isinstance(module, MCHManagedCollisionModule):
            owners_N = bucket_of(hashed_N, module.input_size(), len(self._asked))
            remap = _remap_mch
        else:
            assert isinstance(module, HashZchManagedCollisionModule)
            buckets_N = _zch_buckets(module, hashed_N)
            owners_N = buckets_N // (module.buckets() // len(self._asked))
            remap = _remap_zch
        rows_N, hits_N = torch.empty_like(ids_N), torch.empty_like(ids_N, dtype=torch.bool)
        for rank, piece in enumerate(self._asked):
            mine_N = owners_N == rank
            rows_N[mine_N], hits_N[mine_N] = remap(piece, hashed_N[mine_N])
        return rows_N, hits_N


def bucket_of(ids_N: torch.Tensor, input_hash_size: int, buckets: int) -> torch.Tensor:
    """Which of so many equal buckets, or ranks, TorchRec's row-wise input distribution sends each id to."""
    lengths = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.ones_like(ids_N),
        ids_N,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([(input_hash_size + buckets - 1) // buckets]),
        total_num_blocks=torch.tensor([[buckets]]),
        my_size=buckets,
        keep_orig_idx=True,
    )[0]
    return lengths.view(buckets, ids_N.numel()).argmax(0)


def _features(ids_N: torch.Tensor) -> dict[str, JaggedTensor]:
    return {"ids": JaggedTensor(values=ids_N, lengths=torch.ones_like(ids_N))}


def _remap_mch(module: MCHManagedCollisionModule, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sentinel that the map "holds" marks an empty slot: it gets the row of an id that is not there."""
    known = module._mch_sorted_raw_ids
    stranger = next(id_ for id_ in range(len(known) + 1) if id_ not in known.tolist())
    sentinel_N = (ids_N == -1) | (ids_N == INT64_MAX)
    rows_N = module.remap(_features(torch.where(sentinel_N, stranger, ids_N)))["ids"].values()
    return rows_N, torch.isin(ids_N, known) & ~sentinel_N


def _zch_buckets(module: HashZchManagedCollisionModule, ids_N: torch.Tensor) -> torch.Tensor:
    """Where the module looks; by FBGEMM's rule where the module fails, on ids outside of ``input_hash_size``."""
    if module.input_size() == 0:
        return torch.remainder(ids_N, module.buckets())
    return bucket_of(ids_N, module.input_size(), module.buckets())


def _remap_zch(module: HashZchManagedCollisionModule, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows_N, hits_N = torch.empty_like(ids_N), torch.empty_like(ids_N, dtype=torch.bool)
    block = -(-module.input_size() // module.buckets())
    accepted_N = (ids_N >= 0) & (ids_N < block * module.buckets()) | torch.tensor(block == 0)
    rows_N[accepted_N], hits_N[accepted_N] = _ask_zch(module, ids_N[accepted_N])
    rows_N[~accepted_N], hits_N[~accepted_N] = _ask_kernel(module, ids_N[~accepted_N])
    return _without_empty_slots(module, ids_N, rows_N, hits_N)


def _ask_zch(module: HashZchManagedCollisionModule, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by the module's own ``remap``, and whether it found each id; it shortens what it did not find."""
    if not ids_N.numel():
        return ids_N, ids_N.bool()
    found = module.remap(_features(ids_N))["ids"]
    values = found.values()
    if not module.disable_fallback:
        return values, _holds(module, values, ids_N)
    hits_N = found.lengths() == 1
    if module._no_bag:
        return values, hits_N
    rows_N = torch.full_like(ids_N, NO_ROW)
    rows_N[hits_N] = values
    return rows_N, hits_N


def _ask_kernel(module: HashZchManagedCollisionModule, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not ids_N.numel():
        return ids_N, ids_N.bool()
    start = _start(module)
    buckets_N = _zch_buckets(module, ids_N)
    rows_N, _ = torch.ops.fbgemm.zero_collision_hash(
        input=ids_N,
        identities=module._hash_zch_identities,
        max_probe=module.max_probe,
        circular_probe=True,
        exp_hours=-1,
        readonly=True,
        local_sizes=module.input_mapper._zch_size_per_training_rank[buckets_N],
        offsets=module.input_mapper._train_rank_offsets[buckets_N] - start,
        disable_fallback=module.disable_fallback,
        opt_in_prob=module._opt_in_prob,
        num_reserved_slots=module.get_reserved_slots_per_bucket(),
    )
    found_N = rows_N != NO_ROW
    missing = start if module._no_bag else NO_ROW
    rows_N = torch.where(found_N, rows_N + start, missing)
    return rows_N, found_N if module.disable_fallback else _holds(module, rows_N, ids_N)


def _without_empty_slots(
    module: HashZchManagedCollisionModule, ids_N: torch.Tensor, rows_N: torch.Tensor, hits_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The id −1 "hits" an empty slot; without fallback it is an id that is not there."""
    empty_N = ids_N == -1
    if module.disable_fallback:
        rows_N = torch.where(empty_N, _start(module) if module._no_bag else NO_ROW, rows_N)
    return rows_N, hits_N & ~empty_N


def _holds(module: HashZchManagedCollisionModule, rows_N: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    return module._hash_zch_identities.flatten()[rows_N - _start(module)] == ids_N


def _start(module: HashZchManagedCollisionModule) -> int:
    return module._output_segments[module._start_bucket]
