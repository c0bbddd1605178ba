"""The divergence of each branch from the reference policy, inside the branch's own band.

- `penalty`: the KL of a token, and the penalty inside TRL's loss.
- `law`, `controller`: what moves the coefficients, and the windows over which the KL is measured.
- `branched`: all of this in one object. The trainer adds up over ranks.
"""
