"""Owns reading a repository wherever it lies: a directory, s3, gcs, http, or whatever else fsspec knows.

An object store has no rename and knows no links: a version counts as published once its manifest is there, and every file
is held against it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec

from export.contract import Manifest, RepositoryError
from export.contract.layout import CONFIG_FILE, MANIFEST_FILE, parse_manifest
from export.contract.pins import PIN_FILE

BLOCK_BYTES = 8 << 20


class Source:
    """A model repository that versions come from.

    Args:
        url: A path, or an fsspec URL such as ``s3://bucket/repo``; credentials come from the environment, as each file
            system's own documentation says.

    Raises:
        RepositoryError: No such file system is installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as exc:
            raise RepositoryError(f"{url}: {exc}") from exc

    def collections(self) -> list[str]:
        """Names of everything that may be a collection, sorted; raises ``RepositoryError``."""
        return sorted(name for name in self._directories("") if not name.startswith("."))

    def versions(self, collection: str) -> list[int]:
        """Published versions of a collection, oldest first; raises ``RepositoryError``."""
        numbers = [int(name) for name in self._directories(collection) if name.isdecimal() and name == str(int(name))]
        return sorted(number for number in numbers if self._exists(f"{collection}/{number}/{MANIFEST_FILE}"))

    def manifest(self, collection: str, version: int) -> tuple[Manifest, bytes]:
        """A version's manifest, and its bytes; raises ``RepositoryError``."""
        path = f"{collection}/{version}/{MANIFEST_FILE}"
        content = self._read(path)
        return parse_manifest(content, self._shown(path), collection, version), content

    def config(self, model: str) -> str:
        """config.pbtxt of a Triton model; raises ``RepositoryError``."""
        return self._read(f"{model}/{CONFIG_FILE}").decode()

    def pin(self, collection: str) -> bytes | None:
        """The bytes of a collection's pin; None: it has none. Raises ``RepositoryError``."""
        path = f"{collection}/{PIN_FILE}"
        return self._read(path) if self._exists(path) else None

    def copy(self, path: str, target: Path, on_bytes: Callable[[bytes], Any]) -> None:
        """Copy a file, telling its bytes as they pass.

        Raises:
            RepositoryError: It cannot be read.
            OSError: It cannot be written.
        """
        with target.open("xb") as out:
            with self._reading(path):
                source: BinaryIO = self._fs.open(self._join(path), "rb", block_size=BLOCK_BYTES)
            with source:
                while block := self._block(source, path):
                    on_bytes(block)
                    out.write(block)

    def _block(self, source: BinaryIO, path: str) -> bytes:
        with self._reading(path):
            return source.read(BLOCK_BYTES)

    def _directories(self, path: str) -> list[str]:
        try:
            with self._reading(path, but=(FileNotFoundError, NotADirectoryError)):
                found = self._fs.ls(self._join(path), detail=True)
        except FileNotFoundError:
            if path:
                return []
            raise RepositoryError(f"{self.url}: no such directory") from None
        except NotADirectoryError:
            return []
        return [PurePosixPath(entry["name"].rstrip("/")).name for entry in found if _is_directory(entry)]

    def _exists(self, path: str) -> bool:
        with self._reading(path):
            return bool(self._fs.exists(self._join(path)))

    def _read(self, path: str) -> bytes:
        with self._reading(path):
            return bytes(self._fs.cat_file(self._join(path)))

    def _join(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def _shown(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}".rstrip("/")

    @contextmanager
    def _reading(self, path: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Each file system raises what it likes; all of it is said in one way, ``but`` what the caller sees to."""
        try:
            yield
        except but:
            raise
        except Exception as exc:
            shown = f"{type(exc).__name__}: {str(exc)[:200]}"
            raise RepositoryError(f"{self._shown(path)}: cannot be read: {shown}") from exc


def _is_directory(entry: dict[str, Any]) -> bool:
    """A listing over http does not know what is a directory but by the slash at its end."""
    return bool(entry["type"] == "directory" or entry["name"].endswith("/"))
