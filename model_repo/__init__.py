"""What Triton runs: the shard runtime. Must not import service, nor anything of export but `export.contract`."""
