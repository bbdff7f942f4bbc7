"""One GPU: our plain decoding and every drafter, transformers, and the GEMMs alone as the floor."""
