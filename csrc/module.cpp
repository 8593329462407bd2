// The Python module flash_cuda._C. Importing it registers the ops of torch_binding.cpp; its
// functions show what api/ knows: checks, dispatch, plan, explain.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of flash_cuda: ops, dispatch and checks.";
}
