"""Front tier: validates, batches, dedups and routes KeyedJaggedTensor requests to the shards, and merges the answers.

Must not import torchrec, nor anything of export but ``export.contract``.
"""
