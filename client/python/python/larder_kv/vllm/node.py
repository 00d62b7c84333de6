"""The connection to the node, which may start later and stop at any time."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import larder_kv
from larder_kv.link import Link, goes_on, uncounted

logger = logging.getLogger("vllm.larder")


@dataclass(frozen=True)
class Open:
    """An open session with the engine's namespace."""

    session: larder_kv.Session
    namespace: larder_kv.Namespace

    def __str__(self) -> str:
        return f"{self.session.node}, namespace {self.namespace.fingerprint[:16]}"


class Node(Link[Open]):
    """Keeps a session open, with the engine's namespace registered."""

    def __init__(
        self,
        open_session: Callable[[], larder_kv.Session],
        namespace: larder_kv.NamespaceSpec,
        slices: Sequence[int],
        reconnect_seconds: float,
        count: Callable[[str], None] = uncounted,
        *,
        begins: bool = True,
    ) -> None:
        self.namespace = namespace
        """The namespace of later sessions."""

        def connect() -> Open:
            session = open_session()
            return Open(session, session.register(self.namespace, slices=slices))

        super().__init__(
            connect, reconnect_seconds, logger, count, begins=begins, is_open=lambda opened: goes_on(opened.session)
        )
