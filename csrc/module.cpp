// The Python module flash_cuda._C. Importing it registers the ops of torch_binding.cpp; its
// functions show what api/ knows: checks, dispatch, plan, explain.
//
// Where a function takes the arguments of an op (check_fwd and its like, explain_fwd), it takes
// them as the schema lists them, by position or name, defaults left out at will. A tensor is any
// object with shape, stride(), dtype and device: real, meta, or a stand-in.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "api/args.h"
#include "api/calls.h"
#include "api/check.h"
#include "api/device.h"
#include "api/dispatch.h"
#include "api/explain.h"
#include "api/plan.h"
#include "api/read_args.h"
#if __has_include("build_info.h")
#include "build_info.h"
#endif

#ifndef FLASH_CUDA_BUILD_ARCHS
#define FLASH_CUDA_BUILD_ARCHS ""
#define FLASH_CUDA_BUILD_CODES ""
#define FLASH_CUDA_BUILD_NVCC ""
#define FLASH_CUDA_BUILD_CUDART ""
#define FLASH_CUDA_BUILD_TORCH ""
#define FLASH_CUDA_BUILD_COMMIT ""
#endif

namespace py = pybind11;

namespace flash_cuda {
namespace {

constexpr int kMaxDims = 8;
constexpr int kMaxTensors = 32;

// dtypes of torch are singletons: a pointer tells them apart.
ScalarType scalar_type_of(py::handle dtype) {
  using Entry = std::pair<PyObject*, ScalarType>;
  static const auto* known = [] {
    auto* entries = new std::vector<Entry>;
    const py::module_ torch = py::module_::import("torch");
    for (int i = 0; i < static_cast<int>(ScalarType::kOther); ++i) {
      const auto type = static_cast<ScalarType>(i);
      entries->emplace_back(py::object(torch.attr(name_of(type))).release().ptr(), type);
    }
    return entries;
  }();
  for (const Entry& entry : *known) {
    if (entry.first == dtype.ptr()) return entry.second;
  }
  return ScalarType::kOther;
}

// "a number", as errors say it.
template <class T>
constexpr const char* words_for() {
  if constexpr (std::is_same_v<T, bool>) return "True or False";
  return std::is_integral_v<T> ? "an integer" : "a number";
}

std::string shown(py::handle object) {
  const std::string text = py::repr(object).cast<std::string>().substr(0, 60);
  return join(text, " (", Py_TYPE(object.ptr())->tp_name, ")");
}

// Attribute names as interned strings: a C string would be made into one at each look.
struct Names {
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* device = PyUnicode_InternFromString("device");
  PyObject* type = PyUnicode_InternFromString("type");
  PyObject* index = PyUnicode_InternFromString("index");

  py::object get(py::handle object, PyObject* name) const {
    PyObject* value = PyObject_GetAttr(object.ptr(), name);
    if (!value) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }
};

// Reads the arguments of one call in the order of the schema, and holds shapes and strides.
class ArgReader {
 public:
  ArgReader(const py::tuple& args, const py::dict& kwargs) : args_(args), kwargs_(kwargs) {}

  TensorInfo tensor(const char* name) {
    const py::handle object = next(name);
    if (!object || object.is_none()) refuse_type(name, " must be a tensor, got None");
    return describe(name, object);
  }
  TensorInfo optional_tensor(const char* name) {
    const py::handle object = next(name);
    return !object || object.is_none() ? TensorInfo{name} : describe(name, object);
  }
  template <class T>
  T value(const char* name, T otherwise) {
    const py::handle object = next(name);
    return !object || object.is_none() ? otherwise : cast<T>(name, object);
  }
  template <class T>
  std::optional<T> optional(const char* name) {
    const py::handle object = next(name);
    return !object || object.is_none() ? std::nullopt : std::optional<T>(cast<T>(name, object));
  }
  std::optional<ScalarType> optional_dtype(const char* name) {
    const py::handle object = next(name);
    return !object || object.is_none() ? std::nullopt : std::optional(scalar_type_of(object));
  }
  void finish() const {
    if (next_ == args_.size() && used_kwargs_ == kwargs_.size()) return;
    const std::string names = py::str(py::list(kwargs_)).cast<std::string>();
    throw py::type_error(join("the op has no such argument: ", args_.size() - next_,
                              " too many by position, or one of ", names));
  }

 private:
  template <class T>
  static T cast(const char* name, py::handle object) {
    try {
      return object.cast<T>();
    } catch (const py::cast_error&) {
      refuse_type(name, " must be ", words_for<T>(), ", got ", shown(object));
    }
  }

  struct Dims {
    std::array<int64_t, kMaxDims> sizes, strides;
  };

  py::handle next(const char* name) {
    if (next_ < args_.size())
      return PyTuple_GET_ITEM(args_.ptr(), static_cast<Py_ssize_t>(next_++));
    if (kwargs_.empty()) return {};
    PyObject* found = PyDict_GetItemString(kwargs_.ptr(), name);  // borrowed
    if (found) ++used_kwargs_;
    return found;
  }

  TensorInfo describe(const char* name, py::handle object) {
    static const Names names;
    if (PyObject_HasAttr(object.ptr(), names.stride) == 0) {
      refuse_type(name, " must be a tensor, got ", shown(object));
    }
    TensorInfo t;
    t.name = name;
    Dims& dims = dims_.at(num_tensors_++);
    t.ndim = read(names.get(object, names.shape), dims.sizes, name);
    const py::object strides =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), names.stride));
    if (!strides) throw py::error_already_set();
    if (read(strides, dims.strides, name) != t.ndim) {
      refuse_type(name, " must have a stride a dimension");
    }
    t.sizes = dims.sizes.data();
    t.strides = dims.strides.data();
    t.dtype = scalar_type_of(names.get(object, names.dtype));
    const py::object device = names.get(object, names.device);
    const auto type = names.get(device, names.type).cast<std::string_view>();
    t.device = type == "cpu"    ? DeviceType::kCpu
               : type == "cuda" ? DeviceType::kCuda
               : type == "meta" ? DeviceType::kMeta
                                : DeviceType::kOther;
    if (t.device == DeviceType::kCuda) {
      const py::object index = names.get(device, names.index);
      t.device_index = index.is_none() ? -1 : index.cast<int>();
    }
    if (t.device == DeviceType::kCpu || t.device == DeviceType::kCuda) {
      t.data = reinterpret_cast<const void*>(object.attr("data_ptr")().cast<uintptr_t>());
    }
    return t;
  }
  static int read(const py::object& numbers, std::array<int64_t, kMaxDims>& out, const char* name) {
    if (!PyTuple_Check(numbers.ptr())) refuse_type(name, " must be a tensor");
    const Py_ssize_t count = PyTuple_GET_SIZE(numbers.ptr());
    if (count > kMaxDims) refuse_value(name, " must have at most 5 dimensions, got ", count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers.ptr(), i));
      if (out[i] == -1 && PyErr_Occurred()) throw py::error_already_set();
    }
    return static_cast<int>(count);
  }

  const py::tuple& args_;
  const py::dict& kwargs_;
  size_t next_ = 0, used_kwargs_ = 0, num_tensors_ = 0;
  std::array<Dims, kMaxTensors> dims_;
};

void check_values(const FwdArgs& a, const Sizes& sizes) {
  if (a.q.device != DeviceType::kCpu) return;
  for (const TensorInfo* t : {&a.cu_seqlens_q, &a.cu_seqlens_k, &a.seqused_q, &a.seqused_k,
                              &a.leftpad_k, &a.block_table, &a.cache_batch_idx}) {
    if (t->given() && t->data == nullptr && t->numel() > 0) return;  // explain() knows shapes only
  }
  debug_mode() ? check_lengths(a, sizes) : check_places(a, sizes);
}

void py_check_fwd(const py::args& args, const py::kwargs& kwargs) {
  ArgReader in(args, kwargs);
  const FwdArgs a = read_fwd(in);
  in.finish();
  check_values(a, check_fwd(a));
}

void py_check_bwd(const py::args& args, const py::kwargs& kwargs) {
  ArgReader in(args, kwargs);
  const BwdArgs b = read_bwd(in);
  in.finish();
  check_values(b.fwd, check_bwd(b));
}

void py_check_combine(const py::args& args, const py::kwargs& kwargs) {
  ArgReader in(args, kwargs);
  const CombineArgs a = read_combine(in);
  in.finish();
  check_combine(a);
}

void py_check_kv_append(const py::args& args, const py::kwargs& kwargs) {
  ArgReader in(args, kwargs);
  const KvAppendArgs a = read_kv_append(in);
  in.finish();
  check_kv_append(a);
  if (a.k.device == DeviceType::kCpu) check_append_lengths(a);
}

// ---- explain

py::dict dict_of(const Explanation& e) {
  py::dict d;
  d["served"] = e.served;
  d["kernel"] = e.kernel;
  d["arch"] = e.arch;
  d["block_q"] = e.block_q;
  d["block_kv"] = e.block_kv;
  d["threads"] = e.threads;
  d["cluster"] = e.cluster;
  d["split"] = e.split;
  d["num_splits"] = e.num_splits;
  d["split_size"] = e.split_size;
  d["pack_gqa"] = e.pack_gqa;
  d["workspace_bytes"] = e.workspace_bytes;
  d["refusal"] = e.refusal;
  d["nearest"] = e.nearest;
  d["text"] = text_of(e);
  return d;
}

// compute_capability 0: the GPU of q, or where q is on the CPU, the emulator.
Target target_of(const TensorInfo& q, int compute_capability) {
  Target target;
  if (compute_capability != 0) {
    target.device = typical_device(compute_capability);
  } else if (q.device == DeviceType::kCuda) {
    target.device_index = q.device_index < 0 ? 0 : q.device_index;
    target.device = device_info(target.device_index);
  } else {
    target.emulated = true;
  }
  return target;
}

py::dict py_explain_fwd(int compute_capability, const py::args& args, const py::kwargs& kwargs) {
  ArgReader in(args, kwargs);
  const FwdArgs a = read_fwd(in);
  in.finish();
  return dict_of(explain_fwd(a, check_fwd(a), target_of(a.q, compute_capability)));
}

py::dict py_explain_bwd(int compute_capability, const py::args& args, const py::kwargs& kwargs) {
  ArgReader in(args, kwargs);
  const BwdArgs b = read_bwd(in);
  in.finish();
  return dict_of(explain_bwd(b, check_bwd(b), target_of(b.fwd.q, compute_capability)));
}

// ---- table, override, build

template <class Row>
void append_rows(py::list& list, const char* op, const Row* rows, int count) {
  for (int i = 0; i < count; ++i) {
    py::dict d;
    d["op"] = op;
    d["name"] = rows[i].name;
    d["arch"] = rows[i].arch;
    d["dtype"] = name_of(rows[i].dtype);
    d["head_dim"] = rows[i].head_dim;
    d["head_dim_v"] = rows[i].head_dim_v;
    d["block_q"] = rows[i].block_q;
    d["block_kv"] = rows[i].block_kv;
    d["threads"] = rows[i].threads;
    list.append(std::move(d));
  }
}

py::list py_kernel_table(bool emulated) {
  py::list list;
  for (const Folder& folder : emulated ? emulated_kernels().folders : compiled_folders()) {
    append_rows(list, "fwd", folder.table->fwd, folder.table->num_fwd);
    append_rows(list, "decode", folder.table->decode, folder.table->num_decode);
    append_rows(list, "bwd", folder.table->bwd, folder.table->num_bwd);
  }
  return list;
}

py::dict py_build_info() {
  py::dict d;
  d["archs"] = FLASH_CUDA_BUILD_ARCHS;
  d["codes"] = FLASH_CUDA_BUILD_CODES;
  d["nvcc"] = FLASH_CUDA_BUILD_NVCC;
  d["cudart"] = FLASH_CUDA_BUILD_CUDART;
  d["torch"] = FLASH_CUDA_BUILD_TORCH;
  d["commit"] = FLASH_CUDA_BUILD_COMMIT;
  d["driver"] = driver_cuda_version();
  py::list folders;
  for (const Folder& folder : compiled_folders()) folders.append(join("sm", folder.arch));
  d["folders"] = folders;
  return d;
}

PyObject* python_type(RefusalKind kind) {
  switch (kind) {
    case RefusalKind::kType:
      return PyExc_TypeError;
    case RefusalKind::kUnsupported:
      return PyExc_NotImplementedError;
    case RefusalKind::kValue:
      break;
  }
  return PyExc_ValueError;
}

py::object py_refusal_type(const std::string& text) {
  RefusalKind kind;
  if (!noted_kind(text, &kind)) return py::none();
  return py::reinterpret_borrow<py::object>(python_type(kind));
}

int py_plan_num_splits(int64_t batch, int64_t num_heads_q, int64_t num_heads_kv, int64_t seqlen_q,
                       int64_t seqlen_kv, int block_q, int block_kv, int num_sms, bool pack_gqa) {
  const SplitShape shape{batch,     num_heads_q, num_heads_kv, seqlen_q, batch * seqlen_q,
                         seqlen_kv, block_q,     block_kv,     num_sms};
  return plan_num_splits(shape, pack_gqa, 128);
}

}  // namespace
}  // namespace flash_cuda

PYBIND11_MODULE(_C, m) {
  using namespace flash_cuda;
  m.doc() = "Compiled part of flash_cuda: ops, dispatch and checks.";
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Refusal& refusal) {
      PyErr_SetString(python_type(refusal.kind()), refusal.what());
    }
  });

  m.def("check_fwd", &py_check_fwd,
        "Checks the arguments of fwd: ValueError or TypeError that names the first wrong one. "
        "With FLASH_CUDA_DEBUG=1 also the values of lengths, if they are on the CPU.");
  m.def("check_bwd", &py_check_bwd, "Like check_fwd, for bwd.");
  m.def("check_combine", &py_check_combine, "Like check_fwd, for combine.");
  m.def("check_kv_append", &py_check_kv_append,
        "Like check_fwd, for kv_append_; always checks the values of lengths on the CPU.");
  m.def("refusal_type", &py_refusal_type, py::arg("text"),
        "The exception type that the last refusal of an op in this thread stands for, given its "
        "text: ValueError, TypeError or NotImplementedError; None if the text is another.");

  m.def("set_override", &set_override, py::arg("name"),
        "Forces a kernel path in this thread: 'sm80', 'sm90', 'sm100', 'cpu', 'emulated', "
        "'emulated:ARCH'; '' for what FLASH_CUDA_KERNEL says. Returns what was set before.");
  m.def("override_name", &override_name, "The override in force in this thread, or ''.");
  m.def("load_emulated", &load_emulated, py::arg("path"), py::arg("num_sms") = 2,
        "Loads a library of emulated kernels; returns the arch of its folder (90 for sm90). Of "
        "two of one folder the later one serves.");
  m.def("unload_emulated", &unload_emulated, py::arg("path"),
        "Lets that library serve no further call.");

  m.def("kernel_table", &py_kernel_table, py::arg("emulated") = false,
        "A dict a compiled (or emulated) kernel, in the order in which dispatch tries them.");
  m.def("serves", &serves, py::arg("arch"), py::arg("compute_capability"),
        "Whether kernels of csrc/smARCH run on that compute capability.");
  m.def("explain_fwd", &py_explain_fwd, py::arg("compute_capability"),
        "What serves fwd with the arguments that follow, as a dict with a text; on q's GPU (or "
        "the emulator) for 0, else on a typical device of that compute capability.");
  m.def("explain_bwd", &py_explain_bwd, py::arg("compute_capability"),
        "Like explain_fwd, for bwd.");
  m.def("plan_num_splits", &py_plan_num_splits, py::arg("batch"), py::arg("num_heads_q"),
        py::arg("num_heads_kv"), py::arg("seqlen_q"), py::arg("seqlen_kv"), py::arg("block_q"),
        py::arg("block_kv"), py::arg("num_sms"), py::arg("pack_gqa"),
        "Parts that the KV range is cut into.");
  m.def("build_info", &py_build_info, "What was built, with what, and the driver's CUDA version.");
  m.def(
      "device_info",
      [](int index) {
        const DeviceInfo& info = device_info(index);
        py::dict d;
        d["compute_capability"] = info.compute_capability;
        d["num_sms"] = info.num_sms;
        d["max_smem_per_block"] = info.max_smem_per_block;
        return d;
      },
      py::arg("index"), "What kernels know of a GPU; zeros in a build without kernels.");
}
