"""The store of a mirror: files of one run at an fsspec address, written in pieces, listed, read, removed.

In:  an address (a folder, file://, s3:// and whatever fsspec knows), a run's name, the id of the run.
Out: ADDRESS/NAME/current.json, which names the id; ADDRESS/NAME/run-ID/checkpoint-N/..., complete when manifest.json is there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from lamplighter import read_back
from lamplighter.errors import BadConfig
from lamplighter.readers.http import RemoteFacts
from lamplighter.readers.remote import FsspecOpener, RemoteFile, is_url, open_system
from lamplighter.rundir import checkpoint_name
from lamplighter.safe_text import mask_address

MANIFEST = "manifest.json"
CURRENT: read_back.Fields = {"id": read_back.needed(read_back.TEXT), "t": read_back.TIME}
_PIECE_BYTES = 1 << 20
_PART_BYTES = 1 << 23  # what an object store takes at once: progress is seen by these, and 10,000 of them are a file
_RETRY_S = 120.0  # of a read


def refuse_address(address: str) -> None:
    """What cannot be written to is known by its beginning."""
    if re.match(r"https?://", address):
        raise BadConfig(
            f"save.mirror {mask_address(address)} cannot be written to",
            "a web server takes no files",
            "a folder, s3://bucket/path or another address of fsspec's",
        )


class Store:
    """One run's part of a store. Whatever its file system raises goes through; nothing is tried again here."""

    def __init__(self, address: str, name: str, id: str = "") -> None:
        self.system, root = open_system(address)
        self.root, self.id = f"{root.rstrip('/')}/{name}", id
        self.words = mask_address(address if is_url(address) else root)

    def path(self, name: str) -> str:
        return f"{self.root}/run-{self.id}/{name}"

    # ---------------------------------------------------------------- writing

    def put(self, name: str, pieces: Iterator[bytes], tick: Callable[[int], None]) -> None:
        """A file of this run, replaced where it is there."""
        self._put(self.path(name), pieces, tick)

    def make_current(self) -> None:
        """From now on whoever looks for the run's newest checkpoint finds those of this id."""
        record = json.dumps({"id": self.id}).encode()
        self._put(f"{self.root}/current.json", iter([record]), lambda count: None)

    def _put(self, path: str, pieces: Iterator[bytes], tick: Callable[[int], None]) -> None:
        with self._opened(path) as file:
            for piece in pieces:
                file.write(piece)
                tick(len(piece))

    def _opened(self, path: str) -> Any:
        try:
            return self.system.open(path, "wb", block_size=_PART_BYTES)
        except FileNotFoundError:  # a file system with folders: an object store must not be asked to make a bucket
            self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self.system.open(path, "wb", block_size=_PART_BYTES)

    def remove(self, step: int) -> None:
        """The manifest first: a checkpoint of which half is left must not look whole."""
        folder = self.path(checkpoint_name(step))
        self.remove_manifest(step)
        with contextlib.suppress(FileNotFoundError):  # that is what was wanted
            self.system.rm(folder, recursive=True)

    def remove_manifest(self, step: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.system.rm_file(f"{self.path(checkpoint_name(step))}/{MANIFEST}")

    # ---------------------------------------------------------------- reading

    def current(self) -> str:
        """The id that the store names; empty where there is none yet."""
        try:
            found = read_back.parse_object(self._bytes(f"{self.root}/current.json"))
        except FileNotFoundError:
            return ""
        fits = found is not None and not read_back.find_damage(found, CURRENT)
        return str(found["id"]) if found and fits and re.fullmatch(r"[0-9a-f]{8,32}", found["id"]) else ""

    def _bytes(self, path: str) -> bytes:
        self.system.invalidate_cache()
        return bytes(self.system.cat_file(path, start=0, end=read_back.MOST_BYTES))

    def text(self, name: str) -> bytes:
        """A small file of this run."""
        return self._bytes(self.path(name))

    def sizes(self, step: int) -> dict[str, int]:
        """The files of a checkpoint in the store, by their names in it."""
        folder = self.path(checkpoint_name(step))
        self.system.invalidate_cache()
        found: dict[str, Any] = self.system.find(folder, detail=True)
        mark = f"/run-{self.id}/{checkpoint_name(step)}/"
        return {path.partition(mark)[2]: int(facts.get("size") or 0) for path, facts in found.items() if mark in path}

    def steps(self) -> list[int]:
        """The steps of which something is there, newest first; complete is one with a manifest."""
        self.system.invalidate_cache()
        try:
            listed = self.system.ls(self.path("").rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        names = [re.fullmatch(r"checkpoint-(\d{1,18})", str(path).rstrip("/").rpartition("/")[2]) for path in listed]
        return sorted((int(found[1]) for found in names if found), reverse=True)

    def is_complete(self, step: int) -> bool:
        self.system.invalidate_cache()
        return bool(self.system.exists(f"{self.path(checkpoint_name(step))}/{MANIFEST}"))

    def pieces(self, name: str, size: int, tell: Callable[[str, int], None]) -> Iterator[bytes]:
        """The bytes of a file; a connection that drops is asked again from the byte at which it did."""
        path = self.path(name)
        opener = FsspecOpener(self.system, path, f"{self.words}/{name}")
        facts: RemoteFacts = opener.ask_for_facts(_RETRY_S)
        file = RemoteFile(f"{self.words}/{name}", opener, facts, _RETRY_S)
        return file.blocks(0, _PIECE_BYTES, tell, min(size, facts.size) if facts.size is not None else None)
