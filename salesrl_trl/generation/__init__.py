"""From a prompt to tokens: the protocol of a generation engine, and TRL's engines behind it (`sampler`), what differs
from TRL's generation with vLLM (`vllm`, `merging`), the loops over engines (`engine_loop`), and the folder of
compiled code (`compiled`).

Refuses to know what the tokens are for: no reward, no KL, no schedule.
"""
