"""The divergence of each branch from the reference policy, inside the branch's own band.

Owns the estimators, the penalty inside TRL's loss (`penalty`), the law and the windows that move the coefficients
(`law`, `controller`), all of them in one object (`branched`), the reference policy (`reference`) and the figures.
Refuses to compute a loss, and to add up over ranks: TRL and the trainer do.
"""
