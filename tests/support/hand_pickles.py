"""Pickles, written by hand: pickle itself would not write most of them."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any


def name(module: str, qualname: str) -> bytes:
    """What has a name."""
    return value(module) + value(qualname) + pickle.STACK_GLOBAL


def value(plain: Any) -> bytes:
    """Plain data."""
    return pickle.dumps(plain, 3)[2:-1]


def call(module: str, qualname: str, *arguments: Any) -> bytes:
    """The call of a function."""
    return name(module, qualname) + value(arguments) + pickle.REDUCE


def new(module: str, qualname: str, state: Any) -> bytes:
    """An object of a class, made without its constructor, with attributes."""
    made = name(module, qualname) + value(()) + pickle.NEWOBJ
    return made + value(state) + pickle.BUILD


def method(owner: bytes, attribute: str) -> bytes:
    """A bound method."""
    arguments = owner + value(attribute) + pickle.TUPLE2
    return name("torchrl_hts.env_state.names", "method") + arguments + pickle.REDUCE


def forged(state: bytes, *contents: bytes) -> bytes:
    """A genuine state with other contents, and the right checksum."""
    start = state.index(b"\n") + 1
    head = state[start + hashlib.sha256().digest_size :].partition(b"\n")[0]
    pickles = (pickle.PROTO + b"\x04" + content + pickle.STOP for content in contents)
    body = b"\n".join((head, b"".join(pickles)))
    return state[:start] + hashlib.sha256(body).digest() + body
