"""How good the policy is on held-out rows, while training goes on.

Owns:
- quick evaluations: when one is due (`quick`), its rows (`sample`), its figures (`figures`), its record (`record`);
- the best policy that is kept (`best`), and the evaluations that no other one beats (`pareto`);
- the list of the full evaluations of held-out rows (`held_out`).

Refuses to generate, to score and to know the trainer: answers and their rewards come from a `Subject` (`answers`).
"""
