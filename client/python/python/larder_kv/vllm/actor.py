"""The choice of a node's actor for an engine: its scheduler and its ranks use the same actor."""

from collections.abc import Callable

import larder_kv


class Actor:
    """The actor of a rank: named by the settings, or told by the scheduler."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def open(self, connect: Callable[[int | None], larder_kv.Session]) -> larder_kv.Session:
        """Opens a session with this actor."""
        return connect(self.number)


class ChosenActor(Actor):
    """The actor of a scheduler: if the settings name none, the node chooses the actor with the fewest sessions. The engine keeps
    this actor when the node starts again, unless the node no longer has an actor of this number."""

    def __init__(self, number: int | None) -> None:
        super().__init__(number)
        self._wanted = number

    def open(self, connect: Callable[[int | None], larder_kv.Session]) -> larder_kv.Session:
        try:
            session = super().open(connect)
        except larder_kv.RefusedError as error:
            if error.code == "unknown":
                self.number = self._wanted
            raise
        self.number = session.device
        return session
