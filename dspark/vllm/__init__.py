"""The vLLM plug-in: `method: dspark` with this package's drafting and verification.

Read `plugin.py` (what is activated, and when), `patches.py` (everything that is changed in vLLM) and `requirements.py`
(what is refused at start-up). On the V1 model runner, where vLLM itself refuses the method: `v1.py` (the proposer) and
`context.py` (the drafter's rows in vLLM's paged cache). On the V2 runner, which has a DSpark of its own: `v2_plan.py`
(what runs, the options, and why not), `v2.py` (speculator and rejection sampler), `v2_models.py` (the drafter),
`v2_chain.py` and `v2_verify.py` (our kernels in vLLM's buffers). `kda*.py`: recurrent targets.
Nothing here is imported unless vLLM loads the plug-in; only this package imports vLLM.
"""
