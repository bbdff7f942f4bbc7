"""What a decoder's layers are made of: matrix products, MLPs, norms, rotary embeddings."""
