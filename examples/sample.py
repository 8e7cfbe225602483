"""Owns the sample repository of ``make serve``: trains and exports when something it is made from has changed."""

import hashlib
import shutil
import sys
from pathlib import Path

from examples import train
from examples.modules import load, sample_folder
from export import export_collection
from export.contract import versions

COLLECTION = "ratings"
NUM_SHARDS = 2
PROJECT = Path(__file__).parents[1]
INGREDIENTS = ("examples/*.py", "examples/*.gz", "export/**/*.py", "model_repo/*", "requirements/lock.txt")


def repo_folder() -> Path:
    """Where the sample's model repository lies."""
    return sample_folder() / "repo"


def fingerprint() -> str:
    """SHA-256 over everything that the sample is made from."""
    digest = hashlib.sha256()
    for pattern in INGREDIENTS:
        for path in sorted(PROJECT.glob(pattern)):
            if path.is_file():
                digest.update(str(path.relative_to(PROJECT)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def prepare() -> Path:
    """The sample's model repository, made now unless it is there already."""
    folder, repo = sample_folder(), repo_folder()
    stamp, wanted = folder / "made-from", fingerprint()
    if stamp.is_file() and stamp.read_text() == wanted and versions(repo, COLLECTION):
        print(f"sample: reusing {repo}", file=sys.stderr)
        return repo
    stamp.unlink(missing_ok=True)
    print("sample: training a managed-collision collection on examples/movietweetings.csv.gz", file=sys.stderr)
    train.main(out=folder)
    print(f"sample: exporting it as {COLLECTION!r} on {NUM_SHARDS} shards to {repo}", file=sys.stderr)
    shutil.rmtree(repo, ignore_errors=True)
    export_collection(load(folder), repo, name=COLLECTION, num_shards=NUM_SHARDS)
    stamp.write_text(wanted)
    return repo


if __name__ == "__main__":
    prepare()
