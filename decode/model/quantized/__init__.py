"""Linear layers in few bits, in place of those of a loaded model or draft:

- conversion: replaces the linear layers of a model or a draft's network
- layers: what all kinds have in common
- w8a8: eight bits for weights and activations, products of whole numbers
- int4: four bits for weights, for drafts (int4) and for targets that have them already (w4a8)
- vnni: the products of all on CPUs with AVX512-VNNI, from vnni.cpp, and their attention, from attention.cpp
"""
