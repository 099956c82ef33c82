// The norms as differentiable functions in C++: what norms/functional.py does by autograd functions in Python, for the
// same library. It serves a training step of few tokens, where Python takes longer than the arithmetic. It fits the
// version of torch that it was built with only, and is left out where there is none.
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/extension.h>

#include "native.h"

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
namespace py = pybind11;

int type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case torch::kFloat32: return 0;
    case torch::kFloat64: return 1;
    case torch::kBFloat16: return 2;
    default: return 3;
  }
}

torch::TensorOptions computing(const Tensor& x) {
  return torch::TensorOptions().dtype(x.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32);
}

const void* at(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
void* to(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

// (C,) in the type of the arithmetic; stays undefined.
Tensor vector(const Tensor& v, const Tensor& x) {
  if (!v.defined()) return v;
  TORCH_CHECK(
      v.device() == x.device() && v.dim() == 1 && v.size(0) == x.size(-1), "expected a vector of ", x.size(-1),
      " channels on ", x.device(), ", got one of shape ", v.sizes(), " on ", v.device());
  return v.to(computing(x).dtype()).contiguous();
}

Tensor like(const Tensor& gradient, const Tensor& parameter) {
  return parameter.defined() ? gradient.to(parameter.scalar_type()) : Tensor();
}

using Maybe = std::optional<Tensor>;

Tensor given(const Maybe& tensor) { return tensor ? *tensor : Tensor(); }

bool wants(const Maybe& tensor) { return tensor && tensor->requires_grad(); }

Tensor rows_of(const Tensor& x) { return x.reshape({-1, x.size(-1)}).contiguous(); }

// What the backward pass makes rows of again: x itself, so that a change of it in between is found out, or the copy.
Tensor source(const Tensor& x, const Tensor& rows) { return x.defined() && x.is_contiguous() ? x : rows; }

Tensor flat(const Tensor& padding, const Tensor& rows) {
  if (!padding.defined()) return padding;
  TORCH_CHECK(
      padding.device() == rows.device() && padding.scalar_type() == torch::kBool && padding.numel() == rows.size(0),
      "expected a bool mask of ", rows.size(0), " tokens on ", rows.device(), ", got ", padding.scalar_type(),
      " of shape ", padding.sizes(), " on ", padding.device());
  return padding.reshape(-1).contiguous();
}

Tensor scales(const Tensor& rows, int64_t groups) {
  TORCH_CHECK(
      groups >= 0 && (groups == 0 || rows.size(1) % groups == 0), groups, " groups of ", rows.size(1), " channels");
  return groups ? torch::empty({rows.size(0), groups}, computing(rows)) : Tensor();
}

// Lets other threads of Python run while the library works, where that takes longer than the change.
struct WithoutPython {
  PyThreadState* state;
  explicit WithoutPython(const Tensor& rows)
      : state(rows.numel() >= (1 << 15) && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state != nullptr) PyEval_RestoreThread(state);
  }
};

void check(int result) { TORCH_CHECK(result == 0, "no memory for the sums of a norm's kernel"); }

#define SHAPE(rows, padding, groups, eps)                                         \
  type_of(rows), at::get_num_threads(), rows.size(0), rows.size(1), groups, eps, \
      static_cast<const uint8_t*>(at(padding))

// A function of Python that the backward pass calls with what it adds to the running statistics.
struct Recorder : torch::CustomClassHolder {
  py::object record;
  explicit Recorder(py::object function) : record(std::move(function)) {}
  ~Recorder() override {
    py::gil_scoped_acquire gil;
    record = py::object();
  }
};

void keep(AutogradContext* context, const py::object& record) {
  if (!record.is_none())
    context->saved_data["record"] = c10::IValue::make_capsule(c10::make_intrusive<Recorder>(record));
}

void recorded(AutogradContext* context, const Tensor& contribution) {
  const auto found = context->saved_data.find("record");
  if (found == context->saved_data.end()) return;
  py::gil_scoped_acquire gil;
  c10::static_intrusive_pointer_cast<Recorder>(found->second.toCapsule())->record(contribution);
}

// What of the gradients can be had of these cannot: gradients of gradients. They get an error when they are asked for.
variable_list once(variable_list gradients) {
  if (!torch::GradMode::is_enabled()) return gradients;
  const auto error = std::make_shared<torch::autograd::DelayedError>(
      "trying to differentiate twice a function that is differentiable once only", gradients.size());
  for (Tensor& gradient : gradients)
    if (gradient.defined()) gradient = gradient.detach().requires_grad_();
  return (*error)(std::move(gradients));
}

struct Sums {
  Tensor weight, bias;
  explicit Sums(const Tensor& rows)
      : weight(torch::empty(rows.size(1), computing(rows))), bias(torch::empty(rows.size(1), computing(rows))) {}
};

Tensor contribution_of(const Tensor& rows, int64_t sums) {
  return torch::empty(2 + sums * rows.size(1), torch::kFloat64);
}

struct GroupRMSScale : torch::autograd::Function<GroupRMSScale> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Maybe& weight, const Maybe& bias, const Maybe& padding,
      int64_t groups, double eps, const Maybe& factor, const Maybe& shift) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor rows = rows_of(x), mask = flat(given(padding), rows), gain = vector(given(weight), x);
    const Tensor offset = vector(given(bias), x), a = vector(given(factor), x), centre = vector(given(shift), x);
    const Tensor s = scales(rows, groups), y = torch::empty_like(rows);
    {
      const WithoutPython unlocked(rows);
      check(powernorm_forward_pass(
          SHAPE(rows, mask, groups, eps), at(rows), nullptr, to(s), at(a), at(gain), at(offset), at(centre), to(y),
          nullptr));
    }
    context->save_for_backward(
        {source(x, rows), given(weight), given(bias), source(given(padding), mask), s, given(factor), given(shift)});
    context->saved_data["wants_dx"] = x.requires_grad();
    context->saved_data["wants_sums"] = wants(weight) || wants(bias);
    return y.view(x.sizes());
  }

  static variable_list backward(AutogradContext* context, variable_list outputs) {
    const auto kept = context->get_saved_variables();
    const Tensor &weight = kept[1], &bias = kept[2], &s = kept[4];
    variable_list gradients(8);
    {
      torch::NoGradGuard no_grad;
      const Tensor rows = rows_of(kept[0]), dy = rows_of(outputs[0]), gain = vector(weight, rows);
      const Tensor mask = flat(kept[3], rows), factor = vector(kept[5], rows), centre = vector(kept[6], rows);
      const Tensor a = !factor.defined() ? gain : gain.defined() ? factor * gain : factor;
      const Tensor dx = context->saved_data["wants_dx"].toBool() ? torch::empty_like(rows) : Tensor();
      const bool want_sums = context->saved_data["wants_sums"].toBool();
      const Sums sums(rows);
      check(powernorm_backward_pass(
          SHAPE(rows, mask, s.defined() ? s.size(1) : 0, 0), at(rows), at(dy), at(s), at(a), nullptr, nullptr,
          at(centre), to(dx), want_sums ? to(sums.bias) : nullptr, want_sums ? to(sums.weight) : nullptr));
      if (dx.defined()) gradients[0] = dx.view(outputs[0].sizes());
      if (want_sums) {
        gradients[1] = like(factor.defined() ? sums.weight * factor : sums.weight, weight);
        gradients[2] = like(sums.bias, bias);
      }
    }
    return once(std::move(gradients));
  }
};

struct PowerNorm : torch::autograd::Function<PowerNorm> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Maybe& weight, const Maybe& bias, const Maybe& padding,
      const Tensor& psi_sq, const Tensor& nu, int64_t groups, double eps, bool use_batch_psi, bool released,
      const py::object& record, int64_t scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor rows = rows_of(x), mask = flat(given(padding), rows), psi = vector(psi_sq, x);
    const Tensor gain = vector(given(weight), x), offset = vector(given(bias), x);
    const Tensor s = scales(rows, groups), y = torch::empty_like(rows);
    const Tensor stats = torch::empty({4, rows.size(1)}, computing(rows));
    // The last row is a copy of nu: until the backward pass the norm may have absorbed another update.
    stats[3].copy_(nu);
    {
      const WithoutPython unlocked(rows);
      check(powernorm_power_forward(
          SHAPE(rows, mask, groups, eps), use_batch_psi, released, at(rows), at(psi), at(gain), at(offset), to(y),
          to(s), to(stats)));
    }
    context->save_for_backward({source(x, rows), given(weight), given(bias), source(given(padding), mask), s, stats});
    context->saved_data["scale"] = scale;
    keep(context, record);
    context->saved_data["wants_dx"] = x.requires_grad();
    return y.view(x.sizes());
  }

  static variable_list backward(AutogradContext* context, variable_list outputs) {
    const auto kept = context->get_saved_variables();
    const Tensor &weight = kept[1], &bias = kept[2], &s = kept[4], &stats = kept[5];
    variable_list gradients(12);
    {
      torch::NoGradGuard no_grad;
      const double scale = *reinterpret_cast<const double*>(context->saved_data["scale"].toInt());
      const Tensor rows = rows_of(kept[0]), dy = rows_of(outputs[0]), mask = flat(kept[3], rows);
      const Tensor gain = vector(weight, rows), dx = torch::empty_like(rows);
      const Tensor row = contribution_of(rows, 3), nu = stats[3];
      const Sums sums(rows);
      check(powernorm_power_backward(
          SHAPE(rows, mask, s.defined() ? s.size(1) : 0, 0), scale, at(rows), at(dy), at(s), at(stats), at(nu),
          at(gain), to(dx), to(sums.weight), to(sums.bias), static_cast<double*>(to(row))));
      recorded(context, row);
      if (context->saved_data["wants_dx"].toBool()) gradients[0] = dx.view(outputs[0].sizes());
      gradients[1] = like(sums.weight, weight);
      gradients[2] = like(sums.bias, bias);
    }
    return once(std::move(gradients));
  }
};

// PN-V and BatchNorm: batch statistics with the exact gradient.
using Forward = decltype(powernorm_batch_forward);
using Backward = decltype(powernorm_batch_backward);

template <Forward* FORWARD, Backward* BACKWARD, int STATS, int SUMS>
struct BatchStatistics : torch::autograd::Function<BatchStatistics<FORWARD, BACKWARD, STATS, SUMS>> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Maybe& weight, const Maybe& bias, const Maybe& padding,
      int64_t groups, double eps, const py::object& record) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor rows = rows_of(x), mask = flat(given(padding), rows), gain = vector(given(weight), x);
    const Tensor offset = vector(given(bias), x);
    const Tensor s = scales(rows, groups), y = torch::empty_like(rows);
    const Tensor stats = torch::empty({STATS, rows.size(1)}, computing(rows));
    {
      const WithoutPython unlocked(rows);
      check(FORWARD(SHAPE(rows, mask, groups, eps), at(rows), at(gain), at(offset), to(y), to(s), to(stats)));
    }
    context->save_for_backward({source(x, rows), given(weight), given(bias), source(given(padding), mask), s, stats});
    keep(context, record);
    context->saved_data["wants_dx"] = x.requires_grad();
    return y.view(x.sizes());
  }

  static variable_list backward(AutogradContext* context, variable_list outputs) {
    const auto kept = context->get_saved_variables();
    const Tensor &weight = kept[1], &bias = kept[2], &s = kept[4], &stats = kept[5];
    variable_list gradients(7);
    {
      torch::NoGradGuard no_grad;
      const Tensor rows = rows_of(kept[0]), dy = rows_of(outputs[0]), mask = flat(kept[3], rows);
      const Tensor gain = vector(weight, rows);
      const Tensor dx = context->saved_data["wants_dx"].toBool() ? torch::empty_like(rows) : Tensor();
      const Tensor row = contribution_of(rows, SUMS);
      const Sums sums(rows);
      check(BACKWARD(
          SHAPE(rows, mask, s.defined() ? s.size(1) : 0, 0), at(rows), at(dy), at(s), at(stats), at(gain), to(dx),
          to(sums.weight), to(sums.bias), static_cast<double*>(to(row))));
      recorded(context, row);
      if (dx.defined()) gradients[0] = dx.view(outputs[0].sizes());
      gradients[1] = like(sums.weight, weight);
      gradients[2] = like(sums.bias, bias);
    }
    return once(std::move(gradients));
  }
};

using PowerNormV = BatchStatistics<powernorm_power_v_forward, powernorm_power_v_backward, 2, 1>;
using BatchNorm = BatchStatistics<powernorm_batch_forward, powernorm_batch_backward, 3, 2>;

struct Standardize : torch::autograd::Function<Standardize> {
  static Tensor forward(
      AutogradContext* context, const Tensor& x, double eps, bool released, bool detach_mean, bool detach_sigma,
      double scale, double k) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor rows = rows_of(x), z = torch::empty_like(rows);
    const Tensor kept = torch::empty({2, rows.size(0)}, computing(rows));
    {
      const WithoutPython unlocked(rows);
      check(powernorm_standardize(
          type_of(rows), at::get_num_threads(), rows.size(0), rows.size(1), eps, scale, k, released, false, false,
          at(rows), nullptr, to(kept[0]), to(kept[1]), to(z)));
    }
    context->save_for_backward({source(x, rows), kept});
    context->saved_data["numbers"] = std::vector<double>{eps, scale, k};
    context->saved_data["flags"] = released + 2 * detach_mean + 4 * detach_sigma;
    return z.view(x.sizes());
  }

  static variable_list backward(AutogradContext* context, variable_list outputs) {
    const auto kept = context->get_saved_variables();
    variable_list gradients(7);
    {
      torch::NoGradGuard no_grad;
      const auto numbers = context->saved_data["numbers"].toDoubleVector();
      const int64_t flags = context->saved_data["flags"].toInt();
      const Tensor rows = rows_of(kept[0]), dz = rows_of(outputs[0]), dx = torch::empty_like(rows);
      check(powernorm_standardize(
          type_of(rows), at::get_num_threads(), rows.size(0), rows.size(1), numbers[0], numbers[1], numbers[2],
          flags & 1, flags & 2, flags & 4, at(rows), at(dz), to(kept[1][0]), to(kept[1][1]), to(dx)));
      gradients[0] = dx.view(outputs[0].sizes());
    }
    return once(std::move(gradients));
  }
};

// ---- the end of an update (norms/kernels/native.py: absorb) ----

// Whether the library can do it with these: the contribution, counters and statistics.
bool absorbable(const Tensor& row, std::initializer_list<std::reference_wrapper<const Tensor>> buffers) {
  const auto type = buffers.begin()->get().scalar_type();
  if (row.scalar_type() != torch::kFloat64 || (type != torch::kFloat32 && type != torch::kFloat64)) return false;
  for (const Tensor& buffer : buffers)
    if (!buffer.is_cpu() || buffer.scalar_type() != type || !buffer.is_contiguous()) return false;
  return true;
}

const double* sums_of(const Tensor& row) { return static_cast<const double*>(at(row)); }

bool power_absorb(
    const Tensor& row, const Tensor& tracked, const Tensor& skipped, const Tensor& bounded, const Tensor& psi_sq,
    const Tensor& nu, double alpha_fwd, double alpha_bkw, double update, double warmup, bool released) {
  if (!absorbable(row, {psi_sq, nu, tracked, skipped, bounded})) return false;
  powernorm_power_absorb(
      type_of(psi_sq), psi_sq.size(0), alpha_fwd, alpha_bkw, update, warmup, released, sums_of(row), to(tracked),
      to(skipped), to(bounded), to(psi_sq), to(nu));
  return true;
}

bool power_v_absorb(
    const Tensor& row, const Tensor& tracked, const Tensor& skipped, const Tensor& bounded, const Tensor& psi_sq,
    double alpha_fwd) {
  if (!absorbable(row, {psi_sq, tracked, skipped, bounded})) return false;
  powernorm_power_v_absorb(
      type_of(psi_sq), psi_sq.size(0), alpha_fwd, sums_of(row), to(tracked), to(skipped), to(bounded), to(psi_sq));
  return true;
}

bool batch_absorb(
    const Tensor& row, const Tensor& tracked, const Tensor& skipped, const Tensor& bounded, const Tensor& mean,
    const Tensor& var, double momentum) {
  if (!absorbable(row, {mean, var, tracked, skipped, bounded})) return false;
  powernorm_batch_absorb(
      type_of(mean), mean.size(0), momentum, sums_of(row), to(tracked), to(skipped), to(bounded), to(mean), to(var));
  return true;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def(
      "group_rms_scale",
      [](const Tensor& x, const Maybe& weight, const Maybe& bias, const Maybe& padding, int64_t groups, double eps,
         const Maybe& factor, const Maybe& shift) {
        return GroupRMSScale::apply(x, weight, bias, padding, groups, eps, factor, shift);
      });
  module.def(
      "power_norm",
      [](const Tensor& x, const Maybe& weight, const Maybe& bias, const Maybe& padding, const Tensor& psi_sq,
         const Tensor& nu, int64_t groups, double eps, bool use_batch_psi, bool released, const py::object& record,
         int64_t scale) {
        return PowerNorm::apply(
            x, weight, bias, padding, psi_sq, nu, groups, eps, use_batch_psi, released, record, scale);
      });
  module.def(
      "power_norm_v",
      [](const Tensor& x, const Maybe& weight, const Maybe& bias, const Maybe& padding, int64_t groups, double eps,
         const py::object& record) {
        return PowerNormV::apply(x, weight, bias, padding, groups, eps, record);
      });
  module.def(
      "batch_norm",
      [](const Tensor& x, const Maybe& weight, const Maybe& bias, const Maybe& padding, int64_t groups, double eps,
         const py::object& record) {
        return BatchNorm::apply(x, weight, bias, padding, groups, eps, record);
      });
  module.def("standardize", [](const Tensor& x, double eps, bool released, bool detach_mean, bool detach_sigma,
                               double scale, double k) {
    return Standardize::apply(x, eps, released, detach_mean, detach_sigma, scale, k);
  });
  module.def("power_absorb", &power_absorb);
  module.def("power_v_absorb", &power_v_absorb);
  module.def("batch_absorb", &batch_absorb);
  module.attr("ABI") = ABI;
}
