"""How good the policy is on held-out rows, while training goes on.

Owns the record of quick evaluations (`record`), the evaluations that no other one beats (`pareto`), and when and how
one is made (`quick`). Refuses to score: rewards come from the reward chain.
"""
