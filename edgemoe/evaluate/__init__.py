"""Quality of a model at a list of settings: perplexity, KL to the bf16 model, top-1 agreement, chat tasks."""
