"""The packaged bilingual demo, a course seller: data files alone, written by `scripts/make_demo_data.py`."""
