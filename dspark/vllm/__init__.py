"""The vLLM plug-in: `method: dspark` on the V1 model runner, where vLLM itself refuses it.

Read `plugin.py` (what is activated, and when), `patches.py` (everything that is changed in vLLM), `requirements.py`
(what is refused at start-up), `v1.py` (the proposer) and `context.py` (the drafter's rows in vLLM's paged cache).
Nothing here is imported unless vLLM loads the plug-in; only this package imports vLLM.
"""
