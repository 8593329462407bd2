from typing import Any, TypedDict

class KernelRow(TypedDict):
    op: str
    name: str
    arch: int
    dtype: str
    head_dim: int
    head_dim_v: int
    block_q: int
    block_kv: int
    threads: int

class ExplanationDict(TypedDict):
    served: bool
    kernel: str
    arch: int
    block_q: int
    block_kv: int
    threads: int
    cluster: int
    split: bool
    num_splits: int
    split_size: int
    pack_gqa: bool
    workspace_bytes: int
    refusal: str
    nearest: str
    text: str

class BuildInfo(TypedDict):
    archs: str
    codes: str
    nvcc: str
    cudart: str
    torch: str
    commit: str
    driver: int
    folders: list[str]

class DeviceInfo(TypedDict):
    compute_capability: int
    num_sms: int
    max_smem_per_block: int

def check_fwd(*args: Any, **kwargs: Any) -> None: ...
def check_bwd(*args: Any, **kwargs: Any) -> None: ...
def check_combine(*args: Any, **kwargs: Any) -> None: ...
def check_kv_append(*args: Any, **kwargs: Any) -> None: ...
def refusal_type(text: str) -> type[Exception] | None: ...
def set_override(name: str) -> str: ...
def override_name() -> str: ...
def load_emulated(path: str, num_sms: int = ...) -> int: ...
def unload_emulated(path: str) -> None: ...
def kernel_table(emulated: bool = ...) -> list[KernelRow]: ...
def serves(arch: int, compute_capability: int) -> bool: ...
def explain_fwd(compute_capability: int, *args: Any, **kwargs: Any) -> ExplanationDict: ...
def explain_bwd(compute_capability: int, *args: Any, **kwargs: Any) -> ExplanationDict: ...
def plan_num_splits(
    batch: int,
    num_heads_q: int,
    num_heads_kv: int,
    seqlen_q: int,
    seqlen_kv: int,
    block_q: int,
    block_kv: int,
    num_sms: int,
    pack_gqa: bool,
) -> int: ...
def build_info() -> BuildInfo: ...
def device_info(index: int) -> DeviceInfo: ...
