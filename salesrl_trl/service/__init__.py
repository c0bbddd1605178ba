"""Calls to a service. `http` and the clients decide that an attempt failed, `transport` whether the call did, and
`judged.chain` what that means for the completion. Refuses to know the content of requests."""
