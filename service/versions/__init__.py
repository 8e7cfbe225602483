"""How a version comes to be the one that answers: noticed in the repository, tried out on every shard, taken up."""
