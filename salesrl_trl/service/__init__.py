"""Calls to a service, whatever it answers: one request (`http`), a whole call (`transport`), the `budget`.

`http` and the clients decide that an attempt failed, `transport` whether the call did, and `judged.chain` what that
means for the completion. Refuses to know the content of requests.
"""
