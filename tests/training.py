"""A training loop over a managed collection, as TorchRec's trainer has it."""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Loop:
    """A real loop: forward in training mode, evicted rows reset between remap and lookup, backward, optimizer step."""

    def __init__(self, module, seed=0):
        self.module = module
        self.collection = module._embedding_module
        self.optimizer = torch.optim.Adagrad(self.collection.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(seed)
        self.window = self.reset_rows = 0
        self.evicted = dict.fromkeys(module._managed_collision_collection._managed_collision_modules, 0)
        """By table: rows that evict() named, first use included."""
        self.hook = module._managed_collision_collection.register_forward_hook(self.reset)
        module.train()

    @torch.no_grad()
    def reset(self, maps, *_):
        for table, rows in maps.evict().items():
            if rows is not None:
                weight = self.collection.embeddings[table].weight
                weight[rows] = torch.randn(len(rows), weight.shape[1], generator=self.generator)
                self.reset_rows += len(rows)
                self.evicted[table] += len(rows)

    def draw(self, size):
        """Ids of a window that moves on, so that new ones keep coming."""
        self.window += 3
        near = torch.randint(self.window, self.window + 25, (size,), generator=self.generator)
        return near * 2_654_435_761 % (1 << 40)

    def step(self):
        self.optimizer.zero_grad()
        keys = [feature for config in self.collection.embedding_configs() for feature in config.feature_names]
        ids = [self.draw(30) for _ in keys]
        lengths = torch.ones(30 * len(keys), dtype=torch.int64)
        found, _ = self.module(KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=lengths))
        sum(jagged.values().pow(2).sum() for jagged in found.values()).backward()
        self.optimizer.step()
