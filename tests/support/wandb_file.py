"""Reads what W&B leaves on disk in its offline mode: protocol buffers in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768
_RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_FILE_HEADER = struct.Struct("<4sHB")  # name, magic, version
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path, wanted: str) -> Iterator[Any]:
    """The records of one type in a ``run-*.wandb`` file."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    position, parts = _FILE_HEADER.size, b""
    while position + _RECORD_HEADER.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER.size:
            position += left
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(content, position)
        position += _RECORD_HEADER.size
        parts += content[position : position + length]
        position += length
        assert kind in (_FULL, _FIRST, _MIDDLE, _LAST)
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            if record.WhichOneof("record_type") == wanted:
                yield record
            parts = b""


def history(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged, by metric."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in (record.history.item for record in records(path, "history"))
    ]


def run_record(path: Path) -> Any:
    """What is known of the run itself."""
    return next(record.run for record in records(path, "run"))
