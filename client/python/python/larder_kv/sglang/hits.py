"""Finds the prefixes that can be restored from the pages that each pool has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Literal["all_pages", "trailing_pages", "block_groups"]


@dataclass(frozen=True)
class PoolPages:
    """One pool besides the KV, and the pages of the prompt that it has."""

    name: str
    policy: Policy
    has: Sequence[bool]
    """For each page of the prompt, whether the pool has it."""
    trailing: int = 1
    """`trailing_pages`: number of pages at a prefix's end that the pool needs."""
    block_pages: int = 0
    """`block_groups`: pages of the prompt for which one group stands."""
    group_pages: int = 0
    """`block_groups`: pages of one group; they are the first pages of its block."""


@dataclass(frozen=True)
class Hits:
    """The usable prefixes of a prompt, in pages."""

    pages: int
    """The longest prefix that every pool can restore."""
    of_pool: dict[str, int]
    """By pool, including the KV, the longest prefix that the pool can restore by itself; pools without one are left out."""
    restorable: list[int]
    """All lengths of prefixes that every pool can restore, ascending."""


def fold(kv_pages: int, pools: Sequence[PoolPages]) -> Hits:
    """Combines the pools' pages of a prompt; the KV pool has the first `kv_pages` pages."""
    of_pool = {"kv": kv_pages} if kv_pages else {}
    restorable = list(range(1, kv_pages + 1))
    for pool in pools:
        if pool.policy == "block_groups":
            # This pool has another form of the same pages: it has a longest prefix of its own, and cuts no other.
            own = [leading_blocks(pool, kv_pages)]
        else:
            own = RESTORABLE[pool.policy](pool, kv_pages)
            possible = set(own)
            restorable = [pages for pages in restorable if pages in possible]
        if own and own[-1]:
            of_pool[pool.name] = own[-1]
    return Hits(restorable[-1] if restorable else 0, of_pool, restorable)


def leading(has: Sequence[bool]) -> int:
    """Number of pages that are there, from the first on."""
    return next((number for number, is_there in enumerate(has) if not is_there), len(has))


def leading_blocks(pool: PoolPages, pages: int) -> int:
    """Pages for which the leading whole groups stand."""
    covered = 0
    while pool.block_pages > 0 and covered + pool.block_pages <= pages:
        if not all(pool.has[covered : covered + pool.group_pages]):
            break
        covered += pool.block_pages
    return covered


def everywhere(pool: PoolPages, pages: int) -> list[int]:
    """Prefixes of which the pool has all pages."""
    return list(range(1, leading(pool.has[:pages]) + 1))


def at_the_end(pool: PoolPages, pages: int) -> list[int]:
    """Prefixes of which the pool has the last pages, or all pages of a shorter prefix."""
    found, run = [], 0
    for end in range(1, pages + 1):
        run = run + 1 if pool.has[end - 1] else 0
        if run >= min(pool.trailing, end):
            found.append(end)
    return found


RESTORABLE: dict[str, Callable[[PoolPages, int], list[int]]] = {
    "all_pages": everywhere,
    "trailing_pages": at_the_end,
}
