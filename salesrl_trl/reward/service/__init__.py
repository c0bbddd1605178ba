"""Calls to a service, whatever it answers.

Owns one HTTP request (`http`, `wire`), and everything that a client does about slow and failing services: attempts,
time-outs, limits, hedges, breakers, deadlines (`transport` and the laws that it applies). Refuses to know the content
of requests: `reward.rag` and `reward.judge` own it.
"""
