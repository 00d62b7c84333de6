"""Writes the KV of a prompt and reads it back: `python put_and_get.py SOCKET`."""

import sys

import larder_kv

LAYERS, LAYER_BYTES, CHUNK_TOKENS = 4, 65_536, 256


def main(socket: str) -> None:
    with larder_kv.Session(socket) as session:
        namespace = session.register(
            larder_kv.NamespaceSpec(
                model="example/model",
                kv_dtype="bfloat16",
                layout="example",
                chunk_tokens=CHUNK_TOKENS,
                pools=[larder_kv.Pool(layers=LAYERS, layer_bytes=LAYER_BYTES)],
            )
        )
        prompt = list(range(1_000))
        chain = namespace.chain_of_tokens(prompt)

        with session.reserve(namespace, chain) as reservation:
            for position in reservation.chunks:
                staged = session.stage(reservation, position)
                for layer in range(LAYERS):
                    staged.copy_from(bytes([layer]) * LAYER_BYTES, offset=layer * LAYER_BYTES)
                session.commit(reservation, [staged])

        found = session.lookup(namespace, chain, prompt_tokens=len(prompt))
        print(f"{found.tokens} of {len(prompt)} tokens are in the cache of {session.node}")
        with session.lease(namespace, chain) as lease:
            kv = memoryview(lease.view(0))
            print(f"the last layer of the first chunk begins with {kv[-LAYER_BYTES]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
