"""The build of flash_cuda: what to compile for which GPU, with which compiler, and running it.

`setup.py` and `backend.py` (the PEP 517 backend) are thin callers of `build.build_library`;
`python -m build_tools --help` is the same build for development.
"""
