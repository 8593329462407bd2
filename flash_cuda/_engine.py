"""CPU kernels."""
from flash_cuda import reference
def fwd(*a,**k): return reference.fwd(*a,**k)
def bwd(*a,**k): return reference.bwd(*a,**k)
def combine(*a,**k): return reference.combine(*a,**k)
def kv_append_(*a,**k): return reference.kv_append_(*a,**k)
def check_fwd(*a): pass
def check_kv_append(*a): pass
