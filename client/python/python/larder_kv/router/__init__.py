"""A router in front of inference servers of vLLM: each request goes to the engine where it costs least.

The cost is an engine's backlog, plus the tokens to compute, plus a tenth of the tokens to move there, according to the
coordinator (`POST /v1/prefix`). With separate engines for prefill and decode, each prompt is handed over from one to the other.
`python -m larder_kv.router --help` lists the options. Needs `pip install larder-kv[router]`; vLLM's environment has these
packages already.
"""
