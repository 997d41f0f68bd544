"""An open model and its steps: the engine, the model runner, generation and sampling."""
