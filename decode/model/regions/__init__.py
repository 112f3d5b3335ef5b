"""Decoder layers as regions of compiled code, which is traced and generated once for all layers that are alike.

layer_regions       `mark_regions`: each layer as a region, and the arguments that it is called with
layer_descriptions  which layers are alike: `describe_layer`

May import decode.common, decode.model.attention, kv_cache, layer_stack and linear.
"""
