"""Calls to a service, whatever it answers.

- `http`, `wire`: one HTTP request, and the connection that carries it.
- `transport`: attempts, time-outs and deadlines, by the laws of `limits`, `breaker` and `flights`.
- `budget`: what a run may spend.
- `event_loop`: the clock, the deadline, and objects of one event loop.

`http` and the clients decide that an attempt failed, `transport` whether the call did, and `reward.chain` what that
means for the completion. `salesrl_trl/errors.py` lists the kinds of failures.

Refuses to know the content of requests: `reward.rag_client` and `reward.judge` own it, and call it.
"""
