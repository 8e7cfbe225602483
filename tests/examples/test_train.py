import json

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from examples.events import hash_id, read_events
from examples.modules import (
    CONFIG_FILE,
    FOLDER_VARIABLE,
    IDS_FILE,
    SampleConfig,
    build_managed,
    map_of,
    mapped_ids,
    sample_folder,
    save_sample,
)
from examples.train import batch_kjt, list_ids, load, main, plain, reset_evicted_rows, train

CONFIG = SampleConfig(user_rows=128, item_rows=96, eviction_interval=4, dim=8)
NUM_EVENTS = 6000
TABLES = {"user_table": "user", "item_table": "item"}


@pytest.fixture(scope="module")
def events():
    return read_events(limit=NUM_EVENTS)


@pytest.fixture(scope="module")
def trained(events):
    return train(events, CONFIG)


@pytest.fixture(scope="module")
def summary(trained, events):
    return list_ids(trained, events)


@pytest.fixture(scope="module")
def folder(trained, summary, tmp_path_factory):
    path = tmp_path_factory.mktemp("sample")
    save_sample(path, config=CONFIG, managed=trained.managed, plain=trained.plain, ids=summary)
    return path


def remap(module, table, ids):
    feature = TABLES[table]
    features = {name: torch.tensor(ids if name == feature else [0] * len(ids)) for name in ("user", "item")}
    return module._managed_collision_collection(batch_kjt(features))[feature].values().tolist()


@pytest.mark.parametrize("table", TABLES)
def test_maps_are_full_and_have_evicted(trained, table):
    history = trained.maps[table]
    rows = map_of(trained.managed, table).output_size()
    assert len(history.current) == rows - 1
    assert history.evictions >= len(history.evicted) > 0
    assert history.current == mapped_ids(trained.managed, table)


@pytest.mark.parametrize("table", TABLES)
def test_every_mapped_id_came_from_the_log(trained, events, table):
    keys = events.users if table == "user_table" else events.items
    assert trained.maps[table].ever <= {hash_id(key) for key in keys}


@pytest.mark.parametrize("table", TABLES)
def test_known_ids_have_a_row_each_and_all_others_share_the_last(trained, summary, table):
    default_row = map_of(trained.managed, table).output_size() - 1
    ids = {kind: [entry["id"] for entry in summary[table][kind]] for kind in ("known", "evicted", "never_seen")}
    assert all(len(some) == 20 for some in ids.values())
    known_rows = remap(trained.managed, table, ids["known"])
    assert len(set(known_rows)) == len(known_rows)
    assert default_row not in known_rows
    assert set(remap(trained.managed, table, ids["evicted"])) == {default_row}
    assert set(remap(trained.managed, table, ids["never_seen"])) == {default_row}


@pytest.mark.parametrize("table", TABLES)
def test_listed_ids_are_the_hashes_of_their_keys(summary, table):
    entries = [entry for kind in ("known", "evicted", "never_seen") for entry in summary[table][kind]]
    assert [entry["id"] for entry in entries] == [hash_id(entry["key"]) for entry in entries]


def test_evictions_are_consumed_and_the_modules_do_not_train_on(trained):
    assert set(trained.managed._managed_collision_collection.evict().values()) == {None}
    assert not trained.managed.training
    assert not trained.plain.training


def test_training_lowers_the_error_and_makes_rows_differ(trained):
    assert sum(trained.losses[-5:]) < sum(trained.losses[:5])
    for module in (trained.managed._embedding_collection, trained.plain):
        for table in module.embeddings.values():
            assert len(torch.unique(table.weight, dim=0)) == len(table.weight)


def test_the_same_run_gives_the_same_bits_and_leaves_the_global_generator_alone(events):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    short = read_events(limit=1500)
    first, second = train(short, CONFIG), train(short, CONFIG)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.losses == second.losses
    for one, other in ((first.managed, second.managed), (first.plain, second.plain)):
        ours, theirs = one.state_dict(), other.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_seed_gives_other_rows():
    short = read_events(limit=300)
    one, other = (train(short, CONFIG, seed=seed).plain.state_dict() for seed in (1, 2))
    assert all(not torch.equal(one[name], other[name]) for name in one)


def test_reset_gives_rows_the_initial_range_and_forgets_the_optimizer():
    module = build_managed(CONFIG)
    weight = module._embedding_collection.embeddings["item_table"].weight
    with torch.no_grad():
        weight.fill_(100.0)
    optimizer = torch.optim.Adagrad(module.parameters())
    optimizer.state[weight]["sum"].fill_(7.0)
    evictions = {"user_table": None, "item_table": torch.tensor([3, 5])}
    assert reset_evicted_rows(module, evictions, optimizer) == 2
    others = [row for row in range(CONFIG.item_rows) if row not in {3, 5}]
    assert weight[[3, 5]].abs().max().item() <= CONFIG.item_rows**-0.5
    assert optimizer.state[weight]["sum"][[3, 5]].abs().max().item() == 0.0
    assert bool((weight[others] == 100.0).all())
    assert bool((optimizer.state[weight]["sum"][others] == 7.0).all())


def test_an_id_that_takes_over_a_row_does_not_start_with_the_old_one(trained, events, monkeypatch):
    kept = train(read_events(limit=3000), CONFIG)
    monkeypatch.setattr("examples.train.reset_evicted_rows", lambda *_: 0)
    unreset = train(read_events(limit=3000), CONFIG)
    assert kept.maps["user_table"].current == unreset.maps["user_table"].current
    name = "_embedding_module.embeddings.user_table.weight"
    assert not torch.equal(kept.managed.state_dict()[name], unreset.managed.state_dict()[name])


def test_reload_gives_identical_answers(trained, summary, folder):
    loaded = load(folder)
    assert not loaded.training
    generator = torch.Generator().manual_seed(5)
    random_ids = torch.randint(-(2**63), 2**63 - 1, (500,), generator=generator).tolist()
    for table, feature in TABLES.items():
        listed = [entry["id"] for kind in ("known", "evicted", "never_seen") for entry in summary[table][kind]]
        ids = [*sorted(trained.maps[table].ever), *listed, *random_ids]
        assert remap(loaded, table, ids) == remap(trained.managed, table, ids)
        features = {name: torch.tensor(ids if name == feature else [0] * len(ids)) for name in ("user", "item")}
        ours, theirs = trained.managed(batch_kjt(features))[0], loaded(batch_kjt(features))[0]
        assert torch.equal(ours[feature].values(), theirs[feature].values())


def test_reload_of_the_plain_module_gives_identical_rows(trained, folder):
    loaded = plain(folder)
    kjt = batch_kjt({"bucket": torch.arange(168), "hour": torch.arange(168)})
    for feature, found in loaded(kjt).items():
        assert torch.equal(found.values(), trained.plain(kjt)[feature].values())


def test_loading_nothing_says_what_to_run(tmp_path):
    for factory in (load, plain):
        with pytest.raises(FileNotFoundError, match=r"run `python -m examples\.train`"):
            factory(tmp_path)


def test_an_unfinished_save_is_not_loaded(folder, tmp_path):
    for path in folder.iterdir():
        if path.name != CONFIG_FILE:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(FileNotFoundError, match="holds no trained sample"):
        load(tmp_path)


def test_the_environment_names_the_folder_and_an_argument_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "env"))
    assert sample_folder() == tmp_path / "env"
    assert sample_folder(tmp_path / "argument") == tmp_path / "argument"
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert sample_folder().parts[-2:] == ("build-output", "sample")


def test_command_writes_a_sample_that_loads(tmp_path, monkeypatch):
    app = Typer()
    app.command()(main)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    result = CliRunner().invoke(app, ["--events", "600"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path)
    assert json.loads((tmp_path / IDS_FILE).read_text())["item_table"]["feature"] == "item"
    assert set(load().state_dict()) >= {"_embedding_module.embeddings.user_table.weight"}


def test_command_refuses_no_events():
    app = Typer()
    app.command()(main)
    assert CliRunner().invoke(app, ["--events", "0"]).exit_code == 2
