"""Text at the edge: tokenizer, incremental decoding, stop strings, chat template. Used by clients only."""
