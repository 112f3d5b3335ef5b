"""Speculative decoding: text of a target model, produced faster with the help of a draft."""
