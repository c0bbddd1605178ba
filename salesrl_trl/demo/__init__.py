"""Stand-ins for a user's own RAG services, judge and model.

- `services`: a RAG service and a judge.
- `packaged`: the small policy and the record of the services, which are files of the package.
- `vision`: how a small policy that reads pictures is made.

Owns nothing that a run on a user's own services and model needs. The building of a run calls it.
"""
