"""The benchmark: TTFT and TPOT of one setting or of an ablation, next to the bound by the bytes they moved.

rows.py        which settings are measured; the ablation
synthetic/     stores with random weights, for --synthetic
prompts.py     prompts from a text, conversations or random tokens
run.py         rows, runs and arms in turn: the report
batch.py       several requests at once: the report; batch_run.py: their arrivals; batch_rows.py: a row
sample.py      one prompt and the tokens decoded after it
bandwidth.py   bytes per second of each tier, measured in the same run
summary.py     samples of one row combined, with the bound and the look-ahead
environment.py versions, machine and model
quality.py     rows of an evaluation report, joined by setting
tables.py      the report as Markdown, CSV, JSON and JSON lines
plot.py        the report as a picture
timeline.py    spans of disk, copies and computing, for a trace viewer
traced.py      one extra run of every row with a timeline
"""
