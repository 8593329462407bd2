#include "api/dispatch.h"

#include <algorithm>

#include "api/refusal.h"

namespace flash_cuda {

#ifdef FLASH_CUDA_WITH_SM100
namespace sm100 {
const KernelTable& kernel_table();
}
#endif
#ifdef FLASH_CUDA_WITH_SM90
namespace sm90 {
const KernelTable& kernel_table();
}
#endif
#ifdef FLASH_CUDA_WITH_SM80
namespace sm80 {
const KernelTable& kernel_table();
}
#endif

namespace {

struct FwdRows {
  static const FwdKernel* begin(const KernelTable& t) { return t.fwd; }
  static int count(const KernelTable& t) { return t.num_fwd; }
};
struct DecodeRows {
  static const FwdKernel* begin(const KernelTable& t) { return t.decode; }
  static int count(const KernelTable& t) { return t.num_decode; }
};
struct BwdRows {
  static const BwdKernel* begin(const KernelTable& t) { return t.bwd; }
  static int count(const KernelTable& t) { return t.num_bwd; }
};

const FwdParams& shape_of(const FwdParams& p) { return p; }
const FwdParams& shape_of(const BwdParams& p) { return p.fwd; }

template <class Row>
bool dims_fit(const Row& row, const FwdParams& p) {
  return p.head_dim <= row.head_dim && p.head_dim_v <= row.head_dim_v;
}

// Adds an item to a list separated by commas, unless it is there.
void add_once(std::string* list, const std::string& item) {
  if (join(", ", *list, ", ").find(join(", ", item, ", ")) != std::string::npos) return;
  *list += (list->empty() ? "" : ", ") + item;
}

// Why no row of a folder served the call.
template <class Rows, class Params>
void explain_folder(const Folder& folder, const Params& params, std::vector<std::string>* reasons) {
  const auto* rows = Rows::begin(*folder.table);
  const int count = Rows::count(*folder.table);
  const FwdParams& shape = shape_of(params);
  std::string dtypes, dims;
  bool same_dtype = false, fits = false;
  for (int i = 0; i < count; ++i) {
    add_once(&dtypes, name_of(rows[i].dtype));
    if (rows[i].dtype != shape.dtype) continue;
    same_dtype = true;
    add_once(&dims, join(rows[i].head_dim, "/", rows[i].head_dim_v));
    if (!dims_fit(rows[i], shape)) continue;
    fits = true;
    const char* why = rows[i].refuse(params);
    const std::string line = join(rows[i].name, ": ", why ? why : "");
    if (why && std::find(reasons->begin(), reasons->end(), line) == reasons->end()) {
      reasons->push_back(line);
    }
  }
  const std::string name = join("sm", folder.arch);
  if (count == 0) {
    reasons->push_back(name + ": has no kernel for this op");
  } else if (!same_dtype) {
    reasons->push_back(join(name, ": takes ", dtypes, ", got ", name_of(shape.dtype)));
  } else if (!fits) {
    reasons->push_back(join(name, ": head_dim/head_dim_v up to ", dims, ", got ", shape.head_dim,
                            "/", shape.head_dim_v));
  }
}

template <class Rows, class Params>
auto select(const Kernels& kernels, const Params& params, std::vector<std::string>* reasons)
    -> decltype(Rows::begin(*kernels.folders[0].table)) {
  const FwdParams& shape = shape_of(params);
  for (const Folder& folder : kernels.folders) {
    const auto* rows = Rows::begin(*folder.table);
    for (int i = 0; i < Rows::count(*folder.table); ++i) {
      const bool fits = rows[i].dtype == shape.dtype && dims_fit(rows[i], shape);
      if (fits && rows[i].refuse(params) == nullptr) return &rows[i];
    }
  }
  if (reasons) {
    for (const Folder& folder : kernels.folders) explain_folder<Rows>(folder, params, reasons);
  }
  return nullptr;
}

}  // namespace

bool serves(int arch, int compute_capability) {
  if (arch == 80) return compute_capability >= 80;
  return arch / 10 == compute_capability / 10;
}

const std::vector<Folder>& compiled_folders() {
  static const std::vector<Folder> folders = {
#ifdef FLASH_CUDA_WITH_SM100
      {100, &sm100::kernel_table()},
#endif
#ifdef FLASH_CUDA_WITH_SM90
      {90, &sm90::kernel_table()},
#endif
#ifdef FLASH_CUDA_WITH_SM80
      {80, &sm80::kernel_table()},
#endif
  };
  return folders;
}

const FwdKernel* select_fwd(const Kernels& kernels, const FwdParams& params,
                            std::vector<std::string>* reasons) {
  return select<FwdRows>(kernels, params, reasons);
}
const FwdKernel* select_decode(const Kernels& kernels, const FwdParams& params,
                               std::vector<std::string>* reasons) {
  return select<DecodeRows>(kernels, params, reasons);
}
const BwdKernel* select_bwd(const Kernels& kernels, const BwdParams& params,
                            std::vector<std::string>* reasons) {
  return select<BwdRows>(kernels, params, reasons);
}

void refuse_no_kernel(const Kernels& kernels, const std::vector<std::string>& reasons) {
  std::string text = "no kernel serves this call on compute capability " +
                     capability_text(kernels.device.compute_capability);
  for (size_t i = 0; i < reasons.size(); ++i) text += (i == 0 ? ": " : "; ") + reasons[i];
  if (!override_name().empty()) text += "; the kernel override is '" + override_name() + "'";
  throw Refusal(RefusalKind::kUnsupported, text);
}

std::string capability_text(int compute_capability) {
  return join(compute_capability / 10, ".", compute_capability % 10);
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat32:
      return "float32";
  }
  return "another dtype";
}

DeviceInfo typical_device(int compute_capability) {
  const DeviceInfo known[] = {{80, 108, 166912}, {86, 84, 101376},   {89, 128, 101376},
                              {90, 132, 232448}, {100, 148, 232448}, {103, 148, 232448},
                              {120, 170, 101376}};
  for (const DeviceInfo& device : known) {
    if (device.compute_capability == compute_capability) return device;
  }
  return {compute_capability, 108, 101376};
}

}  // namespace flash_cuda
