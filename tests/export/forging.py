"""Owns changes to a published version that keep its checksums right, as somebody who knows the format could make them."""

import hashlib
import json

from safetensors.torch import load_file, save_file


def forge(directory, path, content):
    """Replace a file and make the manifest agree."""
    (directory / path).write_bytes(content)

    def resize(document):
        for file in document["files"]:
            if file["path"] == path:
                file.update(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    forge_manifest(directory, resize)


def forge_state(directory, shard, change):
    """Change the tensors of a shard, by name."""
    path = directory / f"shard_{shard}" / "state.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(state)
    draft = directory / "draft"
    save_file(state, draft)
    forge(directory, f"shard_{shard}/state.safetensors", draft.read_bytes())
    draft.unlink()


def forge_manifest(directory, change):
    """Change the manifest's document."""
    document = json.loads((directory / "manifest.json").read_text())
    change(document)
    (directory / "manifest.json").write_text(json.dumps(document))
