"""Measurements of this package, beside stock TRL where there is one to compare with.

Run each one from the root of the checkout, as `python -m benchmarks.NAME`; `--help` says what it takes.
benchmarks/log/README.md holds the figures and their commands.

- `pipeline`: the cost of slow rewards in a step;
- `functions`: step times with a slow reward function of a user's own, in each of its four forms;
- `passes`: an update's passes with each prompt once, beside TRL's;
- `push`: a push of an adapter's weights to vLLM, beside TRL's;
- `chains`: the cost of reward chains for vLLM's generation;
- `kl`: the cost of a KL coefficient for each branch;
- `start`: seconds to the end of the first step;
- `memory`: the estimate of memory against the peak, and what settings of training cost;
- `engine`: what settings of vLLM do for generation;
- `peers`: stock TRL, TRL's AsyncGRPO, verl and Unsloth beside this package;
- `sharding`: ZeRO-2, ZeRO-3 and FSDP2 beside one process with the same batch;
- `speculation`: n-gram and suffix drafts in rollouts;
- `timing`: the cost of measuring;
- `kl_simulate`: KL laws (`kl_laws`) against a simulated run (`kl_plant`);
- `kl_control`: KL laws beside fixed coefficients, in real training;
- `vision`: whether a policy learns to read pictures;
- `intervals`: how often an interval of an evaluation holds the mean;
- `crashes`: what is lost by kills, signals and damaged files;
- `view`: the viewer with a large record.

The package and the recipes do not import from here. `common`, `service`, `lengths`, `vllm_server`, `kl_laws`,
`kl_plant`, `crash_runs` and `pipeline_figures` are the shared parts; tests may import them.
"""
