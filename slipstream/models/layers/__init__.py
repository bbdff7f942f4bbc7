"""What a decoder's layers are made of: GEMMs, MLPs, norms, rotary embeddings."""
