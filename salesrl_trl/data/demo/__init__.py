"""The packaged bilingual demo: a course seller, its knowledge base and its conversations."""
