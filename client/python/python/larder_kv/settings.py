"""The settings by which an adapter reaches its node, checked once."""

import logging
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args, get_origin

import larder_kv
from larder_kv.link import Link, Opened

S = TypeVar("S")


class UnsupportedError(ValueError):
    """The engine is set up in a way that cannot be served: it refuses to start, and says what to change."""


Verify: TypeAlias = Literal["off", "sample", "always"]

AT_LEAST_0: Mapping[str, float] = {"least": 0}
AT_LEAST_1: Mapping[str, float] = {"least": 1}
ABOVE_0: Mapping[str, float] = {"above": 0}
"""Metadata of a field of settings: which numbers it takes."""

KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def read_settings(cls: type[S], given: Mapping[str, Any], where: str) -> S:
    """Makes settings of class `cls`, a dataclass, of what stands in `where`, the configuration's name. Raises `UnsupportedError` for
    a key that is no field, a field that is missing, a value of another type than the field's (`None` as if it were not given, where
    the field has a default) and a number out of its range."""
    known: dict[str, Field[Any]] = {known.name: known for known in fields(cls)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise UnsupportedError(f"{where} has `{key}`, which is none of {sorted(known)}")
    chosen = {key: value for key, value in given.items() if value is not None or known[key].default is MISSING}
    for name, setting in known.items():
        if name in chosen:
            check_setting(setting, chosen[name], where)
        elif setting.default is MISSING:
            raise UnsupportedError(f"{where} needs `{name}`")
    return cls(**chosen)


def check_setting(setting: Field[Any], value: Any, where: str) -> None:
    """Raises `UnsupportedError` where the value of one setting is impossible."""

    def refuse(takes: str, advice: str = "") -> UnsupportedError:
        return UnsupportedError(f"`{setting.name}` in {where} is {takes}, not {value!r}{advice}")

    kind: Any = setting.type
    if isinstance(kind, types.UnionType):
        kind = next(member for member in get_args(kind) if member is not types.NoneType)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise refuse(" or ".join(f'"{word}"' for word in get_args(kind)))
        return
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise refuse(KINDS[kind], ": write it without quotes" if isinstance(value, str) else "")
    if kind is str:
        if not value and setting.default is MISSING:
            raise refuse("not empty")
        return
    least, above = setting.metadata.get("least"), setting.metadata.get("above")
    if least is not None and not value >= least:
        raise refuse(f"{KINDS[kind]} of at least {least}")
    if above is not None and not (value > above and math.isfinite(value)):
        raise refuse(f"{KINDS[kind]} above {above}")


@dataclass(frozen=True)
class NodeSettings:
    """Settings that the adapters for caches have in common."""

    socket: str
    """The tenant's socket of the node on this host."""
    device: int | None = field(default=None, metadata=AT_LEAST_0)
    """Which of the node's actors the engine talks to, by number; the node chooses where not given."""
    window_bytes: int = field(default=64 << 20, metadata=AT_LEAST_1)
    """Write window that each rank asks of the node: room for two blocks at least."""
    timeout_seconds: float = field(default=5.0, metadata=ABOVE_0)
    """How long one request to the node may take. A call from the engine begins none later than that."""
    reconnect_seconds: float = field(default=1.0, metadata=ABOVE_0)
    """How often a node that is not there is tried again."""
    verify: Verify = "sample"
    """Which blocks are verified as they are loaded: "off", "sample" (one in 64) or "always". One that is wrong is a miss, and the
    node drops its chunk."""
    model_revision: str = ""
    """Says which weights the model has where the engine does not; part of every key."""

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str) -> Self:
        """Reads what stands in `where`, the configuration's name."""
        return read_settings(cls, given, where)

    def link(self, client: str, logger: logging.Logger) -> Link[Opened]:
        """Keeps a session open as `client`."""

        def connect() -> Opened:
            session = larder_kv.Session(
                self.socket,
                client=client,
                device=self.device,
                window_bytes=self.window_bytes,
                timeout=self.timeout_seconds,
                verify=self.verify,
            )
            return Opened(session)

        return Link(connect, self.reconnect_seconds, logger)

    def check_block(self, what: str, block_bytes: int) -> None:
        """Raises `UnsupportedError` where a block has no room in the window."""
        if block_bytes > self.window_bytes:
            raise UnsupportedError(f"{what} has {block_bytes} bytes: set `window_bytes` to twice that, or more")
