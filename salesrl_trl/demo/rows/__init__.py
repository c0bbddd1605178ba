"""The built-in bilingual demo of a course seller: only data files, written by `scripts/make_demo_data.py`."""
