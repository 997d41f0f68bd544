"""The benchmark: TTFT and TPOT of one setting or of an ablation, beside the bound by the bytes they moved.

command.py   the command line
rows.py      which settings are measured; the ablation
prompts.py   text, conversations or random tokens
run.py       rows, runs and arms in turn: the report
sample.py    one prompt and the tokens after it
bandwidth.py what each tier can do, measured in the same run
summary.py   samples of one row put together, with the bound
lookahead.py how good the look-ahead's guesses were, per layer
timeline.py  who worked when, for a trace viewer

Nothing heavy is imported here: the command line names this package at every start.
"""
