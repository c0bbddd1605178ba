"""From a prompt to tokens.

Owns the protocol of a generation engine (`sampler`), what differs from TRL's generation with vLLM (`vllm`) and the
requests to a vLLM server (`requests`). Refuses to know what the tokens are for: no reward, no KL, no schedule.
"""
