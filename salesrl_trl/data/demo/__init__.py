"""The packaged bilingual demo: a course seller, its knowledge base and its conversations.

Owns the data files alone. `scripts/make_demo_data.py` writes them.
"""
