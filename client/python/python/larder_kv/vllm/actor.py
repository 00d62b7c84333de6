"""Which of a node's actors an engine uses: its scheduler and its ranks the same one."""

from collections.abc import Callable

import larder_kv


class Actor:
    """The actor of a rank: the one that the settings name, or the one that the scheduler tells."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def open(self, connect: Callable[[int | None], larder_kv.Session]) -> larder_kv.Session:
        """Opens a session there."""
        return connect(self.number)


class ChosenActor(Actor):
    """The actor of a scheduler: where the settings name none, the node chooses the one with the fewest sessions. The engine keeps
    it when the node starts again, unless the node has so many actors no more."""

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
