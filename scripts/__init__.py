"""Commands around sampling, training, decoding and evaluation, which nothing in these packages imports."""
