"""A router in front of inference servers of vLLM: each request goes to the engine where it costs least.

The cost is an engine's backlog, the tokens to compute, and a tenth of those to move there, as the coordinator knows them
(`POST /v1/prefix`). Engines for prefill and for decode get each prompt handed over. `python -m larder_kv.router --help` lists
the options. Needs `pip install larder-kv[router]`; vLLM's environment has these packages already.
"""
