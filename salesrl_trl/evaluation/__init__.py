"""The policy's quality on held-out rows, while training goes on.

Owns:
- quick evaluations: their steps (`quick`), rows (`sample`), figures (`quick_figures`) and record (`quick_record`);
- the best policy (`best`), and the evaluations that no other one beats (`pareto`);
- the list of the full evaluations of held-out rows (`held_out`).

Refuses to generate, to score and to know the trainer: answers and their rewards come from a `Subject` (`subject`).
"""
