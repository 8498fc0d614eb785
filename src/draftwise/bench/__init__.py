"""The benchmark: Draftwise's methods and transformers' own, side by side on the same weights.

`run.py` takes the measurements and `methods.py` defines what is measured; `suites.py` reads the
prompts, `journal.py` keeps what is done so far, `summary.py` turns seconds into ratios with
intervals, `environment.py` records where and how, and `report.py` shows the result.

A single machine is noisy and often shared, so methods take turns on every prompt, in an order
shuffled anew, and all ratios are paired by prompt. Losing cases are shown like winning ones.

Traces are replayed without a model: `traces.py` reads them, `costs.py` has the prices, `replay.py`
runs a policy, `oracle.py` knows what could have been; `captured.py`, `spent.py` and
`calibration.py` make figures of it, `studies.py` a report, `replayed.py` tables, `plots.py` plots.
"""
