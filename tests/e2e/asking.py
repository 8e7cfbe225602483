"""One lookup through ``tritonclient``, for tests that want to see each of its parts."""

import numpy as np

OUTPUTS = ("embeddings", "row_ids", "hits", "output_lengths")


def infer(client, api, model, keys, values, lengths, *, outputs=OUTPUTS, **options):  # noqa: PLR0917  as it is read
    arrays = [
        ("values", np.asarray(values, dtype=np.int64), "INT64"),
        ("lengths", np.asarray(lengths, dtype=np.int64), "INT64"),
        ("keys", np.array([key.encode() for key in keys], dtype=np.object_), "BYTES"),
    ]
    inputs = []
    for name, array, datatype in arrays:
        tensor = api.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer(model, inputs, outputs=[api.InferRequestedOutput(name) for name in outputs], **options)
    return {name: result.as_numpy(name) for name in outputs}
