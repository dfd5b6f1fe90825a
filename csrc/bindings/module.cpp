// The pybind11 module flash_attn._C: binds, nothing else. Functions take the ops' arguments by
// position, in the order of the schemas: the short way of eager calls, without torch.ops' boxing.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bwd_parts.h"

namespace flash_attn {
namespace {

// The names that use_backend asked for, the outermost first: a context variable, so that each
// thread and each async context has its own. A property of C++, as torch.compile reads and sets
// those in its traces, and guards on them in the thread that runs, while it cannot trace a context
// variable.
class ForcedBackends {
 public:
  pybind11::object get() const {
    PyObject* names = nullptr;
    if (PyContextVar_Get(variable_.ptr(), nullptr, &names) < 0) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(names);
  }
  void set(const pybind11::tuple& names) const { variable_.attr("set")(names); }

 private:
  pybind11::object variable_ =
      pybind11::module_::import("contextvars")
          .attr("ContextVar")("flash_attn.forced_backends",
                              pybind11::arg("default") = pybind11::tuple());
};

}  // namespace
}  // namespace flash_attn

PYBIND11_MODULE(_C, module) {
  using namespace flash_attn;
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;
  using ExplainFwd = Unpacked<Explanation, FwdArgs>;
  using ExplainDecode = Unpacked<Explanation, DecodeArgs>;
  using AddPart = Unpacked<std::optional<BwdParts::KeyGradients>, BwdArgs>;

  module.def("fwd", wrap_pybind_function_no_gil(&Fwd::from_list<&call_fwd>));
  module.def("bwd", wrap_pybind_function_no_gil(&Bwd::from_list<&call_bwd>));
  module.def("decode", wrap_pybind_function_no_gil(&Decode::from_list<&call_decode>));
  module.def("kvcache", wrap_pybind_function_no_gil(&Kvcache::from_list<&call_kvcache>));
  module.def("heads_first", wrap_pybind_function_no_gil(&call_heads_first));
  module.def("rows_first", wrap_pybind_function_no_gil(&call_rows_first));
  module.def("rng_state", wrap_pybind_function_no_gil(&call_rng_state));
  module.def("unpack", wrap_pybind_function_no_gil(&call_unpack));
  module.def("clear_pages", wrap_pybind_function_no_gil(&clear_pages));
  module.def("reads_pages",
             wrap_pybind_function(&Unpacked<bool, FwdArgs>::from_list<&reads_pages>));
  module.def("explain_fwd", wrap_pybind_function(&ExplainFwd::from_list<&explain_fwd>));
  module.def("explain_bwd", wrap_pybind_function(&ExplainFwd::from_list<&explain_bwd>));
  module.def("explain_decode", wrap_pybind_function(&ExplainDecode::from_list<&explain_decode>));
  module.def("backend_names", &backend_names);
  module.attr("PART_ROW_MULTIPLE") = BwdParams::kPartMultiple;
  pybind11::class_<BwdParts>(module, "BwdParts")
      .def(pybind11::init<at::Tensor, OptTensor, at::Tensor, at::Tensor>())
      .def("add", wrap_pybind_function_no_gil(&AddPart::from_list<&add_part, BwdParts&, int64_t>))
      .def_property_readonly("has_sums", &BwdParts::has_sums)
      .def("store", wrap_pybind_function_no_gil(&BwdParts::store));
  pybind11::class_<ForcedBackends>(module, "ForcedBackends")
      .def(pybind11::init<>())
      .def_property("names", &ForcedBackends::get, &ForcedBackends::set);
}
