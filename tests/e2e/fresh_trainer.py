"""Trains and publishes until it is told to stop: ``python -m tests.e2e.fresh_trainer REPO ANSWERS EVERY BASE_EVERY``.

Workload W3: users with N(100, 25) items a step, the items drawn uniformly from a window that grows with each step, so that
new ids keep coming and old ones are evicted. For each version a file in ANSWERS holds what the module answered then.
Prints a JSON line when it stops (its stdin ends).
"""

import json
import os
import select
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from export import DeltaPublisher
from tests.modules import map_of, untrained_collection

ROWS = {"user": 1500, "item": 4000}
DIM = 32
STEP_S = 0.1
"""A step takes as long at least: 2 cores are for serving, too."""
USERS_A_STEP = 8
WINDOW_STEP = 12


def spread_id(number):
    """A 64-bit id for a running number."""
    return (number * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 62)


class Trainer:
    def __init__(self, repo, answers, every_s, base_every_s):
        self.answers, self.every_s, self.base_every_s = answers, every_s, base_every_s
        self.rng = np.random.default_rng(3)
        self.window = 2000
        self.module = untrained_collection(ROWS, dim=DIM, policy="lru", eviction_interval=1)
        self.module.train()
        self.collection = self.module._embedding_module
        self.maps = self.module._managed_collision_collection
        self.optimizer = torch.optim.Adagrad(self.collection.parameters(), lr=0.05)
        self.evicted = dict.fromkeys(ROWS, 0)
        self.maps.register_forward_hook(self.reset)
        for _ in range(3):
            self.step()
        self.publisher = DeltaPublisher(
            self.module, repo, name="c", every=1e9, base_every=base_every_s, max_overlay=1e9, num_shards=2, keep=12
        )
        self.save(self.snapshot(), self.publisher.published.version)
        self.step_s, self.publish_s = [], []

    @torch.no_grad()
    def reset(self, maps, *_):
        for table, rows in maps.evict().items():
            if rows is not None:
                self.evicted[table] += len(rows)
                weight = self.collection.embeddings[table].weight
                weight[rows] = torch.randn(len(rows), DIM)

    def step(self):
        self.window += WINDOW_STEP
        counts = np.maximum(1, self.rng.normal(100, 25, USERS_A_STEP).astype(np.int64))
        users = self.rng.integers(max(0, self.window // 4 - 2500), self.window // 4, USERS_A_STEP)
        items = self.rng.integers(max(0, self.window - 6000), self.window, counts.sum())
        ids = [spread_id(int(one)) for one in (*users, *items)]
        lengths = np.concatenate([np.ones(USERS_A_STEP, dtype=np.int64), counts])
        kjt = KeyedJaggedTensor(keys=["user", "item"], values=torch.tensor(ids), lengths=torch.from_numpy(lengths))
        self.optimizer.zero_grad()
        found, _ = self.module(kjt)
        sum((jagged.values() - 0.5).pow(2).sum() for jagged in found.values()).backward()
        self.optimizer.step()

    def snapshot(self):
        held = {}
        for table in ROWS:
            known = map_of(self.module, table)
            ids = np.array(sorted(known), dtype=np.int64)
            held[f"{table}_ids"] = ids
            held[f"{table}_rows"] = np.array([known[one] for one in ids.tolist()], dtype=np.int64)
            held[f"{table}_weight"] = self.collection.embeddings[table].weight.detach().numpy().copy()
        held["window"] = np.array(self.window)
        open_slots = self.maps.open_slots()
        held["open_slots"] = np.array([int(open_slots[table]) for table in ROWS])
        held["evicted"] = np.array([self.evicted[table] for table in ROWS])
        return held

    def save(self, held, version):
        draft = self.answers / f".{version}.npz"
        np.savez(draft, **held)
        draft.replace(self.answers / f"{version}.npz")

    def run(self):
        due = time.monotonic() + self.every_s
        waiting = None
        while not select.select([sys.stdin], [], [], 0)[0]:
            started = time.monotonic()
            self.step()
            stepped = time.monotonic()
            self.publisher.step()
            if waiting is not None and not self.publisher.busy:
                self.publisher.join()
                assert self.publisher.failure is None, self.publisher.failure
                self.save(waiting, self.publisher.published.version)
                waiting = None
            publishing = waiting is None and stepped >= due
            before = time.monotonic()
            if publishing:
                due = stepped + self.every_s
                self.publisher.publish()
            self.step_s.append(stepped - started)
            self.publish_s.append(before - stepped + (time.monotonic() - before if publishing else 0.0))
            if publishing:
                waiting = self.snapshot()
            time.sleep(max(0.0, STEP_S - (time.monotonic() - started)))
        self.publisher.close()
        if waiting is not None:
            self.save(waiting, self.publisher.published.version)
        return {
            "steps": len(self.step_s),
            "version": self.publisher.published.version,
            "step_s": sum(self.step_s),
            "publisher_s": sum(self.publish_s),
            "evicted": self.evicted,
        }


def main():
    repo, answers, every_s, base_every_s = sys.argv[1:]
    torch.manual_seed(1)
    torch.set_num_threads(1)
    os.nice(10)  # a trainer has a machine of its own; here it gives way to those that serve
    trainer = Trainer(Path(repo), Path(answers), float(every_s), float(base_every_s))
    print(json.dumps({"window": trainer.window}), flush=True)
    print(json.dumps(trainer.run()), flush=True)


if __name__ == "__main__":
    main()
