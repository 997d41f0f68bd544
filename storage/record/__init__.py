"""Records: planes of an expert's bytes, their layouts and resident forms, and the codes in them."""
