"""One GPU: our plain decoding and every drafter, transformers, and the matrix products alone as the floor."""
