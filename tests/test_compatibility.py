"""docs/compatibility.md is true: every test that it names is there, and every refusal says what the page says it says."""

import ast
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    grid_shard,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from export import export_collection
from export.errors import ExportError
from tests.export.ranks import export_as_rank, shard, shard_halves, shard_no_bag
from tests.modules import (
    configs,
    hash_zch_collection,
    hash_zch_module,
    managed_collection,
    plain_collection,
    untrained_collection,
)

PROJECT = Path(__file__).parents[1]
PAGE = (PROJECT / "docs" / "compatibility.md").read_text()
ROW = re.compile(r"^\| (?P<what>[^|]+?) \| (?P<answer>[^|]+?) \| (?P<tests>[^|]+?) \|$", re.MULTILINE)
TITLES = ["Served", "Served, and compared in part", "Refused"]
_, SERVED, PARTLY, REFUSED = re.split(rf"^## (?:{'|'.join(TITLES)})$", PAGE, flags=re.MULTILINE)


def rows_of(section):
    found = [row.groupdict() for row in ROW.finditer(section)]
    return [row for row in found if not row["what"].startswith("TorchRec") and "---" not in row["what"]]


def names_in(path):
    tree = ast.parse((PROJECT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def export(module, tmp_path, **options):
    export_collection(module, tmp_path / "repo", name="c", **options)


def table(name="user", rows=8, **options):
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name], **options)


def bags():
    tables = [EmbeddingBagConfig(name="user", num_embeddings=4, embedding_dim=4, feature_names=["user"])]
    return EmbeddingBagCollection(tables=tables)


def quantised():
    module = plain_collection()
    observer = torch.quantization.PlaceholderObserver
    module.qconfig = torch.quantization.QConfig(
        activation=observer.with_args(dtype=torch.float), weight=observer.with_args(dtype=torch.qint8)
    )
    return QuantEmbeddingCollection.from_float(module)


class OwnCollisions(ManagedCollisionModule):
    def __init__(self):
        super().__init__(torch.device("cpu"), output_segments=[0, 8])

    def preprocess(self, features):
        return features

    profile = remap = forward = preprocess

    def evict(self):
        return None

    def output_size(self):
        return 8

    def input_size(self):
        return 2**63 - 1

    def open_slots(self):
        return torch.tensor([0])

    def buckets(self):
        return 1

    def rebuild_with_output_id_range(self, output_id_range, output_segments, device=None):
        return self

    def validate_state(self):
        pass


def managed_by(collision):
    tables = configs({"user": 8})
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=tables), ManagedCollisionCollection({"user": collision}, tables)
    )


def with_other_buckets():
    collision = hash_zch_module(8, buckets=2)
    collision._hash_zch_bucket.fill_(4)
    return managed_by(collision)


def without_its_bucket_count(out):
    state = hash_zch_collection({"user": 64}, buckets=4).state_dict()
    said = {name: value for name, value in state.items() if not name.endswith("_hash_zch_bucket")}
    export(hash_zch_collection({"user": 64}, buckets=2), out, checkpoint=said)


def dispatched():
    collision = hash_zch_module(8)
    collision.input_mapper._inference_dispatch_div_train_world_size = True
    return managed_by(collision)


def evicted():
    module = managed_collection()
    module._managed_collision_collection._managed_collision_modules["item"]._evicted = True
    return module


def planned(way, *, local=2, ranks=4):
    module = plain_collection(dim=256)  # TorchRec cuts no columns off narrower rows
    ways = {"user": way, "item": row_wise(), "one": row_wise()}
    plan = construct_module_sharding_plan(
        module,
        ways,
        sharder=EmbeddingCollectionSharder(),
        local_size=local,
        world_size=ranks,
        device_type="cpu",
    )
    return module, plan


def on_two_devices():
    module = plain_collection()
    ways = {"user": row_wise(), "item": row_wise(), "one": table_wise(rank=1, device="cpu")}
    plan = construct_module_sharding_plan(
        module, ways, sharder=EmbeddingCollectionSharder(), local_size=2, world_size=2, device_type="cuda"
    )
    return module, plan


def live(way, kernel, world):
    """One table, sharded over one rank."""
    module = shard(plain_collection({"user": 8}, dim=8), {"user": way}, EmbeddingCollectionSharder(), world)
    module.module_sharding_plan["user"].compute_kernel = kernel  # said afterwards: upstream's SSD kernel needs a GPU
    return module


def by_one_rank(make, tmp_path, **options):
    raise ExportError(export_as_rank(make, 1, tmp_path, 0, **options))


def by_two_ranks(make, tmp_path):
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        heard = list(pool.map(partial(export_as_rank, make, 2, tmp_path), range(2), timeout=120))
    assert heard[0] == heard[1]
    raise ExportError(heard[0])


def by_plan(made, tmp_path):
    module, plan = made
    export(module, tmp_path, plan=plan)


REFUSALS = {
    "`EmbeddingBagCollection`, with or without managed collision": lambda out: export(bags(), out),
    "`torchrec.quant` collections": lambda out: export(quantised(), out),
    "A whole model, or any other module": lambda out: export(nn.Sequential(plain_collection()), out),
    "A collection without tables": lambda out: export(EmbeddingCollection(tables=[]), out),
    "Virtual tables": lambda out: export(EmbeddingCollection(tables=[table(use_virtual_table=True)]), out),
    "Tables on SSD": lambda out: by_one_rank(partial(live, row_wise(), "key_value"), out),
    "A feature twice in one table": lambda out: export(plain_collection({"user": 8}, {"user": ["u", "u"]}), out),
    "Outputs of one name": lambda out: export(plain_collection({"t": 4, "u": 4}, {"t": ["a@u", "a"], "u": ["a"]}), out),
    "Another managed collision module": lambda out: export(managed_by(OwnCollisions()), out),
    "Evictions that nobody consumed": lambda out: export(evicted(), out),
    "`evicted='reset'` with a checkpoint": lambda out: export(
        untrained_collection(), out, checkpoint=untrained_collection().state_dict(), evicted="reset"
    ),
    "An `input_hash_func` that looks at several ids": lambda out: export(
        untrained_collection({"user": 4}, input_hash=lambda ids, _: torch.argsort(ids)), out
    ),
    "MPZCH state of another bucket count": lambda out: export(with_other_buckets(), out),
    "MPZCH state of other options, where it does not say so": without_its_bucket_count,
    "MPZCH opt-in without reserved slots": lambda out: export(
        managed_by(hash_zch_module(8, buckets=8, fallback="reserved")), out
    ),
    "MPZCH with `inference_dispatch_div_train_world_size`": lambda out: export(dispatched(), out),
    "MPZCH with `no_bag`, trained on several ranks": lambda out: by_two_ranks(shard_no_bag, out),
    "`GRID_SHARD` that cuts rows and columns": lambda out: by_plan(planned(grid_shard(host_indexes=[0, 1])), out),
    "A whole model's `ShardingPlan`": lambda out: export(plain_collection(), out, plan=ShardingPlan({"ec": {}})),
    "One rank on two devices": lambda out: by_plan(on_two_devices(), out),
    "Live column-wise tables as int8": lambda out: by_one_rank(
        partial(live, column_wise(ranks=[0]), "fused"), out, row_dtype="int8"
    ),
    "Live tables sharded over a part of the ranks: `DMPCollection`, 2D parallel": lambda out: by_two_ranks(
        shard_halves, out
    ),
    "Numbers that a row dtype cannot hold": lambda out: export(huge(), out, row_dtype="fp16"),
    "Rows of double precision": lambda out: export(plain_collection().double(), out),
    "A module on the meta device, without its state": lambda out: export(
        EmbeddingCollection(tables=[table()], device=torch.device("meta")), out
    ),
}


def huge():
    module = plain_collection()
    with torch.no_grad():
        module.embeddings["item"].weight[3, 1] = 1e6
    return module


def test_the_page_names_no_test_that_is_not_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert missing == []


def test_every_row_of_the_page_has_its_test():
    tables = [rows_of(section) for section in (SERVED, PARTLY, REFUSED)]
    assert [len(rows) > least for rows, least in zip(tables, (25, 1, 20), strict=True)] == [True] * 3
    rows = [row for rows in tables for row in rows]
    assert [row["what"] for row in rows if "::" not in row["tests"]] == []


def test_every_refusal_of_the_page_is_tried_here():
    assert [row["what"] for row in rows_of(REFUSED)] == list(REFUSALS)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # upstream's own, of MPZCH
@pytest.mark.parametrize("what", list(REFUSALS))
def test_a_refusal_is_the_line_on_the_page(what, tmp_path):
    (line,) = [row["answer"].strip("`") for row in rows_of(REFUSED) if row["what"] == what]
    with pytest.raises(ExportError) as raised:
        REFUSALS[what](tmp_path)
    assert str(raised.value) == line
    assert not list(tmp_path.glob("repo/c/[0-9]*"))
