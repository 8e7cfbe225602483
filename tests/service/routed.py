"""Collections of any mix of routings, requests to them, and what they answer: drawn by hypothesis, looked up directly."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from export.contract import Manifest, OutOfRange, Placement, Routing, Table, TrainingBuckets
from service.batch import PreparedBatch, place_reply, prepare_batch
from service.catalog import ServedVersion
from service.types import LookupRequest, Output
from service.validate import Limits, ValidRequest, validate
from tests.manifests import RuleShard, hit_of, make_table, make_version, row_id_of, row_of

LIMITS = Limits(max_ids=10_000_000, max_reply_bytes=1 << 40)
OUTPUTS = frozenset(Output) - {"weights", "indices"}
ROWS = 100

any_id = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, 1, 2**63 - 1, -(2**63)]), st.integers(-3, ROWS + 3)
)
row_number = st.integers(0, ROWS - 1)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request: keys in an order of its own, and each key's samples."""

    ids: Mapping[str, Sequence[Sequence[int]]]

    def lengths(self) -> np.ndarray:
        """INT64 [F, B]."""
        lengths = [[len(sample) for sample in samples] for samples in self.ids.values()]
        return np.array(lengths, dtype=np.int64).reshape(len(self.ids), -1)

    def values(self, key: str) -> np.ndarray:
        return np.array([one for sample in self.ids[key] for one in sample], dtype=np.int64)

    @property
    def request(self) -> LookupRequest:
        return LookupRequest(
            collection="clicks",
            keys=tuple(self.ids),
            values_N=np.concatenate([self.values(key) for key in self.ids]),
            lengths_FB=self.lengths(),
            outputs=OUTPUTS,
        )

    def valid(self, version: ServedVersion) -> ValidRequest:
        return validate(self.request, version, LIMITS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collection and requests to it."""

    manifest: Manifest
    version: ServedVersion
    requests: Sequence[Asked]

    def blocks(self, asked: Asked) -> list[tuple[Table, str, str]]:
        """(table, embedding name, key) of each block of a reply, in its order."""
        return [
            (table, name, key)
            for key in asked.ids
            for feature, table, name in self.manifest.embeddings
            if feature == key
        ]

    def ids(self, asked: Asked) -> list[tuple[str, int]]:
        """(table, id) of each row of a reply."""
        return [(table.name, int(one)) for table, _, key in self.blocks(asked) for one in asked.values(key)]

    def lookup(self, asked: Asked) -> Mapping[Output, np.ndarray]:
        """The answer without any routing: row after row, by the rule."""
        blocks = self.blocks(asked)
        flat = np.concatenate([asked.values(key) for *_, key in blocks])
        rows = [row_of(table.name, asked.values(key), self.manifest.dim) for table, _, key in blocks]
        lengths = dict(zip(asked.ids, asked.lengths(), strict=True))
        return {
            Output.EMBEDDINGS: np.concatenate(rows),
            Output.OUTPUT_LENGTHS: np.concatenate([lengths[key] for *_, key in blocks]).astype(np.int32),
            Output.ROW_IDS: row_id_of(flat),
            Output.HITS: hit_of(flat),
        }

    def prepare(self, *indices: int, avoid: frozenset[int] = frozenset()) -> PreparedBatch:
        """The batch of all requests, or of some."""
        chosen = [self.requests[index] for index in indices] or self.requests
        return prepare_batch(self.version, [asked.valid(self.version) for asked in chosen], avoid=avoid)

    def answer(self, batch: PreparedBatch, order: Sequence[int]) -> None:
        """Let shards answer, in this order; those that no id goes to are not asked."""
        for shard in order:
            request = batch.shard_request(shard)
            if request.ids_N.size:
                place_reply(batch, shard, RuleShard(self.manifest, shard).answer(request))

    def sent(self, batch: PreparedBatch) -> dict[tuple[str, int], list[int]]:
        """By (table, id): the shards that it is sent to, each as often as it is."""
        sent: dict[tuple[str, int], list[int]] = {}
        for shard in self.manifest.shards:
            request = batch.shard_request(shard.index)
            parts = np.split(request.ids_N, np.cumsum(request.table_lengths_T)[:-1]) if shard.tables else []
            for entry, ids in zip(shard.tables, parts, strict=True):
                for one in ids.tolist():
                    sent.setdefault((entry.table, one), []).append(shard.index)
        return sent


@st.composite
def cuts(draw, end: int, pieces: int):
    """Edges of ``pieces`` ranges that cover [0, end), empty ones among them."""
    return [0, *sorted(draw(st.lists(st.integers(0, end), min_size=pieces - 1, max_size=pieces - 1))), end]


@st.composite
def training_buckets(draw):
    edges = draw(cuts(ROWS, draw(st.integers(1, 6))))
    size = draw(st.sampled_from([0, 0, 1, 50, 101, 2**40, 2**63 - 1]))
    return TrainingBuckets(input_hash_size=size, row_edges=tuple(edges), floor_modulo=size == 0 and draw(st.booleans()))


@st.composite
def placements(draw, routing: Routing, num_shards: int, dim: int, training: TrainingBuckets):
    shards = draw(st.permutations(range(num_shards)))
    some = draw(st.integers(1, num_shards))
    if routing is Routing.HASH:
        return [Placement(shard=s, row_start=0, row_stop=ROWS) for s in range(num_shards)]
    if routing is Routing.COLUMNS:
        inner = sorted(draw(st.sets(st.integers(1, dim - 1), max_size=dim - 1)))
        homes = [draw(st.integers(0, num_shards - 1)) for _ in (0, *inner)]
        return [
            Placement(shard=s, row_start=0, row_stop=ROWS, col_start=start, col_stop=stop)
            for s, start, stop in zip(homes, [0, *inner], [*inner, None], strict=True)
        ]
    if routing is Routing.REPLICATED:
        return [Placement(shard=s, row_start=0, row_stop=ROWS) for s in shards[:some]]
    if routing is Routing.TABLE:
        return [Placement(shard=shards[0], row_start=0, row_stop=ROWS)]
    if routing is Routing.TRAINING:
        edges = [0, *sorted(draw(st.sampled_from(training.row_edges)) for _ in range(some - 1)), ROWS]
    else:
        edges = draw(cuts(ROWS, some))
    ranges = itertools.pairwise(edges)
    return [
        Placement(shard=s, row_start=start, row_stop=stop) for s, (start, stop) in zip(shards, ranges, strict=False)
    ]


@st.composite
def collections(draw):
    """Tables of any routings; the feature ``both`` is looked up in the first two."""
    num_shards = draw(st.integers(1, 8))
    dim = draw(st.sampled_from([3, 4, 6, 12]))
    tables = []
    for i, routing in enumerate(draw(st.lists(st.sampled_from(Routing), min_size=1, max_size=5))):
        training = draw(training_buckets())
        tables.append(
            make_table(
                f"t{i}",
                [f"f{i}", f"g{i}", "both"] if i < 2 else [f"f{i}", f"g{i}"],
                routing=routing,
                num_shards=num_shards,
                rows=ROWS,
                dim=dim,
                shared=["both"],
                placements=draw(placements(routing, num_shards, dim, training)),
                training=training,
                out_of_range=draw(st.sampled_from(OutOfRange)),
            )
        )
    return make_version(tables, num_shards)


@st.composite
def cases(draw, most_requests: int = 4):
    manifest, version = draw(collections())
    picky = {
        feature
        for feature, table, _ in manifest.embeddings
        if not table.managed and table.out_of_range is OutOfRange.REJECT
    }
    requests = []
    for _ in range(draw(st.integers(1, most_requests))):
        batch_size = draw(st.integers(0, 3))
        ids = {
            key: draw(
                st.lists(
                    st.lists(row_number if key in picky else any_id, max_size=4),
                    min_size=batch_size,
                    max_size=batch_size,
                )
            )
            for key in draw(st.permutations(manifest.features))
        }
        requests.append(Asked(ids=ids))
    return Case(manifest=manifest, version=version, requests=requests)
