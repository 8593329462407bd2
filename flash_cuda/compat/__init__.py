"""Adapters: flash_cuda under the names and signatures of other libraries.

- :mod:`flash_cuda.compat.fa2`: ``from flash_attn import ...``
- :mod:`flash_cuda.compat.bert_padding`: ``from flash_attn.bert_padding import ...``
- :mod:`flash_cuda.compat.fa3`: ``flash_attn_interface``
- :mod:`flash_cuda.compat.fa4`: ``flash_attn.cute``
- :mod:`flash_cuda.compat.sdpa`: ``torch.nn.functional.scaled_dot_product_attention``
- :mod:`flash_cuda.compat.transformers`: ``attn_implementation="fcuda"``

None of them is active until it is called, and none imports the library that it stands in for
before that.
"""
