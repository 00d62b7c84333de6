"""The errors of requests. A miss is no error."""


class LarderError(Exception):
    """Any failure between this process and its node."""


class ConnectError(LarderError):
    """No process listens on the socket, or this process may not open it: try again later, or continue without the cache."""


class EndedError(LarderError):
    """The session is over, as the node stopped or closed it: open a new one."""


class BusyError(LarderError):
    """No room, or too much in flight; nothing was done. Ask again later, or continue without the cache."""

    what: str
    """The exhausted resource: "memory", "claims", "sessions" or "copies"."""
    retry_after: float
    """Seconds after which asking again may help."""


class DamagedError(LarderError):
    """A block's bytes differ from the committed bytes, or a followed block did not come: treat its chunk as a miss. The node was
    told of differing bytes, and verifies them."""

    position: int
    """Position of the chunk among those leased."""
    block: int
    """The block."""


class GpuError(LarderError):
    """A GPU is missing, refused, failed or was lost: the content of the copy's target is unknown."""


class RefusedError(LarderError):
    """The node refused; nothing was done, and asking again will not help."""

    code: str
    """The class of the reason: "version", "protocol", "namespace", "chain", "unknown", "place", "too_large", "stopping",
    "device" or "internal"."""


class RequestTimeout(LarderError, TimeoutError):
    """No answer within the session's timeout. Anything that a late answer grants is given back."""


class WindowError(LarderError):
    """One chunk of the namespace does not fit in the session's write window: open a session with a larger one."""


class ReleasedError(LarderError):
    """The session was closed, or the lease, ticket, reservation or staged chunk was given back, before this call."""


class ForkedError(LarderError):
    """This object belongs to the process that forked: open a session of your own after the fork."""
