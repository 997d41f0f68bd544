"""Quality of a model at a list of settings: perplexity, KL to the bf16 model, top-1 agreement, chat tasks.

studies.py     which settings are measured: the table and the studies
run.py         the evaluation: the reference, then every setting through an engine
request.py     what it measures, and what it returns; plans.py: its memory
settings_runs.py  an engine for each plan
arm_rows.py    rows of settings; reference_rows.py: rows of the bf16 model
score.py       windows of text through the reference and through an engine
metrics.py     logits to perplexity, KL and top-1 agreement
accuracy.py    chat tasks answered by edgemoe and by the reference
reference.py   the bf16 model, a layer of it lowered, and the file that keeps its logits
observations.py what routers choose and see, layer by layer
rows.py        one row of the report
claims.py      statements of the paper compared with the rows
table.py       the report as text
plot.py        the report as pictures
tasks.py       chat tasks with one right answer; task_words.py: their words and facts
"""
