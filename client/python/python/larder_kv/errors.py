"""Reasons why a request has no result. A miss is no error."""


class LarderError(Exception):
    """Whatever goes wrong between this process and its node."""


class ConnectError(LarderError):
    """Nobody listens on the socket, or it may not be opened: try again later, or do without."""


class EndedError(LarderError):
    """The session is over, as the node stopped or closed it: open another."""


class BusyError(LarderError):
    """No room, or too much in flight; nothing was done. Ask again later, or do without."""

    what: str
    """What there is too much of: "memory", "claims", "sessions" or "copies"."""
    retry_after: float
    """When asking again may help, in seconds."""


class DamagedError(LarderError):
    """A block has other bytes than were committed under its name, or is followed and has not come: do as if its chunk were not there.
    The node was told of bytes that differ, and verifies them."""

    position: int
    """Position of the chunk among those leased."""
    block: int
    """The block."""


class GpuError(LarderError):
    """A GPU is not there, refused, failed or was lost: what is in the copy's target is unknown."""


class RefusedError(LarderError):
    """The node refused; nothing was done, and asking again will not help."""

    code: str
    """The class of the reason: "version", "protocol", "namespace", "chain", "unknown", "place", "too_large", "stopping",
    "device" or "internal"."""


class RequestTimeout(LarderError, TimeoutError):
    """No answer within the session's timeout. What a late answer grants is given back."""


class WindowError(LarderError):
    """One chunk of the namespace does not fit in the session's write window: open a session with a larger one."""


class ReleasedError(LarderError):
    """The session was closed, or the lease, ticket, reservation or staged chunk given back, before."""


class ForkedError(LarderError):
    """This belongs to the process that forked: connect a session of your own after the fork."""
