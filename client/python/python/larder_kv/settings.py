"""How an adapter reaches its node: what users choose, parsed once."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypeAlias, cast, get_args

import larder_kv
from larder_kv.link import Link, Opened


class UnsupportedError(ValueError):
    """The engine is set up in a way that cannot be served: it refuses to start, and says what to change."""


Verify: TypeAlias = Literal["off", "sample", "always"]


def check_verify(word: str) -> Verify:
    """The setting, if it is one."""
    for known in get_args(Verify):
        if word == known:
            return cast(Verify, known)
    raise UnsupportedError(f'`verify` is "off", "sample" or "always", not {word!r}')


@dataclass(frozen=True)
class NodeSettings:
    """Settings that the adapters for caches have in common. A key that is none of them is an error."""

    socket: str
    """The tenant's socket of the node on this host."""
    device: int | None = None
    """Which of the node's actors the engine talks to, by number; the node chooses where not given."""
    window_bytes: int = 64 << 20
    """Write window that each rank asks of the node: room for two blocks at least."""
    timeout_seconds: float = 5.0
    """How long one request to the node may take. A call from the engine begins none later than that."""
    reconnect_seconds: float = 1.0
    """How often a node that is not there is tried again."""
    verify: str = "sample"
    """Which blocks are verified as they are loaded: "off", "sample" (one in 64) or "always". One that is wrong is a miss, and the
    node drops its chunk."""
    model_revision: str = ""
    """Says which weights the model has where the engine does not; part of every key."""

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str) -> Self:
        """Reads what stands in `where`, the configuration's name."""
        known = {field.name for field in fields(cls)}
        for key in given:
            if key not in known:
                raise UnsupportedError(f"{where} has `{key}`, which is none of {sorted(known)}")
        if "socket" not in given:
            raise UnsupportedError(f"{where} needs `socket`: the path of the node's socket")
        settings = cls(**given)
        for name in ("timeout_seconds", "reconnect_seconds"):
            if getattr(settings, name) <= 0:
                raise UnsupportedError(f"`{name}` must be more than 0")
        check_verify(settings.verify)
        return settings

    def link(self, client: str, logger: logging.Logger) -> Link[Opened]:
        """Keeps a session open as `client`."""

        def connect() -> Opened:
            session = larder_kv.Session(
                self.socket,
                client=client,
                device=self.device,
                window_bytes=self.window_bytes,
                timeout=self.timeout_seconds,
                verify=check_verify(self.verify),
            )
            return Opened(session)

        return Link(connect, self.reconnect_seconds, logger)

    def check_block(self, what: str, block_bytes: int) -> None:
        """Raises `UnsupportedError` where a block has no room in the window."""
        if block_bytes > self.window_bytes:
            raise UnsupportedError(f"{what} has {block_bytes} bytes: set `window_bytes` to twice that, or more")
