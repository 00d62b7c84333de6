"""Asks for many prompts at once, from coroutines: `python prefetch.py SOCKET`."""

import asyncio
import sys

import larder_kv


async def tokens_in_place(session: larder_kv.AsyncSession, namespace: larder_kv.Namespace, prompt: list[int]) -> int:
    ticket = await session.lookup_and_prefetch(namespace, namespace.chain_of_tokens(prompt), prompt_tokens=len(prompt))
    # The node brings the found chunks from disk and other nodes; meanwhile, this task may do something else.
    async with await session.collect(ticket, wait=0.5) as lease:
        return lease.tokens


async def main(socket: str) -> None:
    async with await larder_kv.AsyncSession.connect(socket) as session:
        namespace = await session.register(
            larder_kv.NamespaceSpec(
                model="example/model",
                kv_dtype="bfloat16",
                layout="example",
                pools=[larder_kv.Pool(layers=4, layer_bytes=65_536)],
            )
        )
        prompts = [list(range(start, start + 1_000)) for start in range(8)]
        tokens = await asyncio.gather(*(tokens_in_place(session, namespace, prompt) for prompt in prompts))
        print("tokens in place:", *tokens)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
