"""The stages of a preflight, in order of cost: can this run work?

- `stage`: the form of a stage and of its findings.
- `plan`: the settings, and the parts that stages make of them for later stages and for the run.
- `runner`: the list of the stages, a preflight of them, and `prepare`, the start of a run.
- A module for each stage, or for two that belong together.

A run passes the same stages, up to the first that loads a model. So a preflight and a run have one code and one
message. Refuses to check a single setting, row or address: `config`, `data` and `build.checks` do that.
"""
