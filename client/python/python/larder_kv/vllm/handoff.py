"""Prefill and decode on different engines: the fields of `kv_transfer_params`, and the copies layer by layer.

A prefill request has `{"do_remote_decode": true}`, and `"remote_attempt"` if a router tries again. Its answer has the fields for
the decode request: `{"do_remote_prefill": true, "remote_node", "remote_device", "remote_attempt", "remote_chunks",
"remote_hash"}`. A router that knows the prefill's node sends the decode at the same time, with `do_remote_prefill`, `remote_node`
and `remote_device`: chunks are named by their content, so nothing else is needed. A router that does not know an engine's node
asks for it with `{"report_node": true}`: the answer has `"node"` and `"device"`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import larder_kv
from larder_kv.patience import Patience
from larder_kv.vllm.node import Open

MOST_DEVICE, MOST_ATTEMPT = 65_535, (1 << 64) - 2
MOST_NAME = 256
"""The most characters of a node's name."""


@dataclass(frozen=True)
class Writer:
    """The engine that computes a prompt."""

    node: str
    device: int = 0
    attempt: int = 0
    """The earliest attempt whose layers are wanted."""


def writer_of(params: Mapping[str, Any] | None) -> Writer | None:
    """The engine that prefills a request that is decoded here; None if no other engine does, or its node or device cannot be one."""
    if not params or not params.get("do_remote_prefill"):
        return None
    node, device = params.get("remote_node"), number_in(params, "remote_device", MOST_DEVICE)
    if not isinstance(node, str) or not 0 < len(node) <= MOST_NAME or device is None:
        return None
    return Writer(node, device, attempt_in(params))


def attempt_of(params: Mapping[str, Any] | None) -> int | None:
    """The attempt at a prefill for a decode on another engine; None if the request is decoded here."""
    return attempt_in(params) if params and params.get("do_remote_decode") else None


def attempt_in(params: Mapping[str, Any]) -> int:
    """The attempt in the parameters; 0 if none is given, or no number that a node knows."""
    return number_in(params, "remote_attempt", MOST_ATTEMPT) or 0


def number_in(params: Mapping[str, Any], name: str, most: int) -> int | None:
    """A parameter from 0 to `most`; 0 if it is not given, None if it is anything else. The parameters come from clients, and vLLM
    ends if a connector raises an error."""
    value = params.get(name)
    if value is None:
        return 0
    return value if type(value) is int and 0 <= value <= most else None


def params_for_decode(node: Open | None, attempt: int, hashes: Sequence[bytes]) -> dict[str, Any] | None:
    """The decode request's parameters, after a prefill that ends here."""
    if node is None or not hashes:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_node": node.session.node,
        "remote_device": node.session.device,
        "remote_attempt": attempt,
        "remote_chunks": len(hashes),
        # Hashes are chained: the last one names them all.
        "remote_hash": hashes[-1].hex(),
    }


def report_of(asked: Mapping[str, Any] | None, node: Open | None) -> dict[str, Any] | None:
    """The node that the engine uses, for a request that asks for it."""
    if node is None or not asked or not asked.get("report_node"):
        return None
    return {"node": node.session.node, "device": node.session.device}


def attempt_to_write(attempt: int | None) -> int:
    """The node's number of an attempt to write; None if nothing is handed over. A router numbers attempts from 0, but to a node 0 is
    ordinary writing, which no attempt ends."""
    return 0 if attempt is None else attempt + 1


def attempt_to_follow(attempt: int) -> int:
    """The node's number of the earliest attempt to follow. All attempts are as late as the first, also those of engines that do not
    count as `attempt_to_write` does."""
    return attempt_to_write(attempt) if attempt > 0 else 0


def follow_chunks(
    node: Open, hashes: Sequence[bytes], first_chunk: int, writer: Writer, patience: float
) -> larder_kv.Follow:
    """Follows the chunks from `first_chunk` on. Chunks that are here already count as having come."""
    chain = node.namespace.chain(list(hashes)).part(first_chunk)
    return node.session.follow(
        node.namespace,
        chain,
        node=writer.node,
        device=writer.device,
        attempt=attempt_to_follow(writer.attempt),
        patience=patience,
    )


def hand_over_layer(
    node: Open,
    reservation: larder_kv.Reservation,
    pieces: Sequence[tuple[list[int], list[int]]],
    layer: int,
    copy: Callable[[larder_kv.StagedLayers, list[int]], bool],
    pool: int,
    patience: Patience,
) -> bool:
    """Hands over a layer of a pool that the engine has computed. `pieces` are positions of chunks and their blocks, each piece as
    large as the room allows. `copy` fills the room from the blocks. If it returns False, because the blocks may no longer be
    read, this function returns False too."""
    for positions, pages in pieces:
        staged = node.session.stage_layers(reservation, positions, layer, layer + 1, pool=pool)
        if not copy(staged, pages):
            return False
        patience.ask(partial(node.session.hand_over, staged))
    return True
