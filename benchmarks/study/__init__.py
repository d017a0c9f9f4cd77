"""Studies: protocols fixed before the first run, runs that resume, paired statistics, a report.

``python -m benchmarks.study NAME --size SIZE --out DIR`` is the way in; ``__main__`` is the main path.
"""
