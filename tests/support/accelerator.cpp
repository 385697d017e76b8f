// A pretend accelerator: torch's PrivateUse1 with two devices, whose memory is the CPU's. See accelerator.py.
//
// Every operator runs on the CPU, on tensors that share the memory (`fallback`). What CUDA refuses is refused first, and
// what would make the host wait for CUDA is reported to a Python function (`report`).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_map>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::Stream;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;
constexpr long SOON = 20;  // an event that was recorded fewer operators ago has not happened yet

thread_local DeviceIndex current = 0;
std::atomic<long> launched{0};
PyObject* recorder = nullptr;

DeviceIndex place(DeviceIndex index) { return index < 0 ? current : index; }

void report(const char* kind, const std::string& what) {
  if (!recorder || !Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  auto* result = PyObject_CallFunction(recorder, "ss", kind, what.c_str());
  if (!result) throw pybind11::error_already_set();
  Py_DECREF(result);
}

// ---- memory, streams and events: those of the CPU ------------------------------------------------------------------

template <class T>
void drop(void* held) { delete static_cast<T*>(held); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return on(current, bytes); }
  c10::DataPtr on(DeviceIndex index, size_t bytes) {
    auto* held = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    return {held->get(), held, &drop<c10::DataPtr>, Device(KIND, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    Device old(KIND, current);
    current = place(device.index());
    return old;
  }
  Device getDevice() const override { return Device(KIND, current); }
  void setDevice(Device device) const override { current = place(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = place(device.index()); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new long;
    *static_cast<long*>(*event) = launched;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override { return launched - *static_cast<long*>(event) >= SOON; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<long*>(event); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { report("synchronize", "stream"); }
  void synchronizeEvent(void* event) const override {
    if (!queryEvent(event)) report("synchronize", "an event that was just recorded");
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- generators: those of the CPU, under another name --------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Generator(DeviceIndex index, at::Generator from = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(Device(KIND, index), DispatchKeySet(DispatchKey::PrivateUse1)), inner(std::move(from)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override { return new Generator(device().index(), inner.clone()); }
};

at::Generator& default_generator(DeviceIndex index) {
  static at::Generator all[COUNT] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all[place(index)];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<Generator>(place(index)); }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto fresh = allocator.on(storage.device().index(), bytes);
    memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
Hooks hooks;

// ---- tensors of the device as tensors of the CPU, and back ----------------------------------------------------------

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

struct Bridge {
  DeviceIndex index = 0;
  std::unordered_map<c10::StorageImpl*, Storage> to_cpu, to_device;  // so that views stay views
  std::vector<Storage> kept;

  static Storage share(const Storage& storage, Device device, c10::Allocator* by) {
    c10::DataPtr data(storage.mutable_data(), new Storage(storage), &drop<Storage>, device);
    return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), by, true);
  }
  static at::Tensor like(const at::Tensor& tensor, Storage storage, DispatchKey key) {
    auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), tensor.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) out._set_conj(true);
    if (tensor.is_neg()) out._set_neg(true);
    return out;
  }
  at::Tensor down(const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = to_cpu.find(key);
    if (found == to_cpu.end()) {
      auto cpu = share(tensor.storage(), Device(c10::kCPU), c10::GetCPUAllocator());
      found = to_cpu.emplace(key, cpu).first;
      to_device.emplace(cpu.unsafeGetStorageImpl(), tensor.storage());
    }
    return like(tensor, found->second, DispatchKey::CPU);
  }
  at::Tensor up(const at::Tensor& tensor) {
    // A tensor without storage (an undefined gradient, an efficient zero) has no memory to share.
    if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
    if (tensor._is_zerotensor()) return up(at::zeros(tensor.sizes(), tensor.options()));
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = to_device.find(key);
    if (found == to_device.end()) {
      found = to_device.emplace(key, share(tensor.storage(), Device(KIND, index), &allocator)).first;
      kept.push_back(tensor.storage());
    }
    return like(tensor, found->second, DispatchKey::PrivateUse1);
  }
  void settle() {  // storages that the operator has resized
    for (auto& [device, cpu] : to_cpu)
      if (cpu.data() != device->data() || cpu.nbytes() != device->nbytes()) {
        device->set_data_ptr_noswap({cpu.mutable_data(), new Storage(cpu), &drop<Storage>, device->device()});
        device->set_nbytes(cpu.nbytes());
      }
  }
};

// ---- every operator -------------------------------------------------------------------------------------------------

bool starts(const std::string& name, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(), [&](const char* word) { return name.rfind(word, 0) == 0; });
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.operator_name().name.substr(schema.operator_name().name.find("::") + 2);
  const auto count = schema.arguments().size(), begin = stack->size() - count;
  const bool indexing = starts(name, {"index", "_index_put", "_unsafe_index"});
  const bool scalars = indexing || op.hasTag(at::Tag::pointwise) || starts(name, {"masked_fill", "where", "_foreach", "fill"});
  launched++;

  Bridge bridge;
  bridge.index = current;
  auto each = [&](const c10::IValue& value, auto&& visit) {
    if (value.isTensor()) visit(value.toTensor());
    else if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
    else if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) if (tensor) visit(*tensor);
  };
  bool found = false;
  for (size_t i = 0; i < count; i++)
    each((*stack)[begin + i], [&](const at::Tensor& tensor) {
      if (!found && is_ours(tensor)) bridge.index = tensor.device().index(), found = true;
    });

  // What CUDA refuses.
  for (size_t i = 0; i < count; i++)
    each((*stack)[begin + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || (is_ours(tensor) && tensor.device().index() == bridge.index)) return;
      const bool cpu = tensor.device().is_cpu();
      if (cpu && tensor.dim() == 0 && (scalars || tensor.unsafeGetTensorImpl()->is_wrapped_number())) return;
      if (cpu && indexing && (*stack)[begin + i].isOptionalTensorList()) return report("to the device", name + ": an index on the CPU");
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, pretend:",
                  int(bridge.index), " and ", tensor.device(), "! (", name, ")");
    });

  std::vector<c10::IValue> originals(stack->begin() + begin, stack->end());
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) value = bridge.down(value.toTensor());
    else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(bridge.down(tensor));
      value = c10::IValue(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(bridge.down(*tensor)) : tensor);
      value = c10::IValue(list);
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      if (!found) bridge.index = place(value.toDevice().index());
      value = c10::IValue(Device(c10::kCPU));
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == KIND, "Expected a 'pretend' device type for generator but found '",
                  generator.device().type(), "' (", name, ")");
      value = c10::IValue(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner);
    } else if (value.isNone() && schema.arguments()[i].name() == "generator") {
      value = c10::IValue(static_cast<Generator*>(default_generator(bridge.index).unsafeGetGeneratorImpl())->inner);
    }
  }

  // What the host waits for: a number, a shape that depends on values, or what a solver says of its success.
  if (op.hasTag(at::Tag::data_dependent_output)) report("a number", name);
  else if (op.hasTag(at::Tag::dynamic_output_shape) && !indexing) report("a shape", name);
  else if (starts(name, {"_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq"})) report("a solver", name);
  for (size_t i = 0; indexing && i < count; i++)
    if (originals[i].isOptionalTensorList())
      each(originals[i], [&](const at::Tensor& index) {
        if (index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte)) report("a shape", name + ": a mask");
      });

  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  bridge.settle();

  // What was written into: the CPU's tensor may have a new shape.
  for (size_t i = 0; i < count; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !originals[i].isTensor() || !is_ours(originals[i].toTensor())) continue;
    auto tensor = originals[i].toTensor();
    for (size_t r = 0; r < schema.returns().size(); r++) {
      const auto* returned = schema.returns()[r].alias_info();
      auto& value = (*stack)[stack->size() - schema.returns().size() + r];
      if (!returned || !returned->isWrite() || returned->beforeSets() != alias->beforeSets() || !value.isTensor()) continue;
      const auto& cpu = value.toTensor();
      if (cpu.sizes() != tensor.sizes() || cpu.strides() != tensor.strides() || cpu.storage_offset() != tensor.storage_offset())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      value = tensor;
    }
  }
  for (size_t r = stack->size() - schema.returns().size(); r < stack->size(); r++) {
    auto& value = (*stack)[r];
    if (value.isTensor()) value = bridge.up(value.toTensor());
    else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(bridge.up(tensor));
      value = c10::IValue(list);
    }
  }
}

// ---- operators that make memory, look at it in another way, or move it ------------------------------------------------

constexpr DispatchKeySet KEYS(DispatchKey::PrivateUse1);

struct On {  // makes new memory belong to a device
  DeviceIndex before = current;
  explicit On(std::optional<Device> device) { if (device) current = place(device->index()); }
  ~On() { current = before; }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  On on(device);
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}
at::Tensor zeros(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<Device> device, std::optional<bool> pin) {
  return empty(C10_AS_INTARRAYREF_SLOW(size), dtype, layout, device, pin, std::nullopt).zero_();
}
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_storage(at::Tensor& self, Storage storage) { return at::cpu::set_(self, storage); }
at::Tensor& set_storage_at(at::Tensor& self, Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  launched++;
  const auto numbers = std::to_string(from.numel()) + " numbers";
  if (!non_blocking && is_ours(from) && !is_ours(to)) report("to the host", numbers);
  if (!non_blocking && !is_ours(from) && !from.unsafeGetTensorImpl()->is_wrapped_number()) report("to the device", numbers);
  Bridge bridge;
  at::AutoDispatchBelowADInplaceOrView below;
  bridge.down(to).copy_(bridge.down(from));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zeros);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());  // otherwise taken apart first
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
// Copies resolve lazy conjugates and negatives themselves: torch's own way to resolve them copies, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](pybind11::object report_to) {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    recorder = report_to.release().ptr();
  });
  m.def("stop", [] { recorder = nullptr; });
  m.def("default_generator", [](int index) { return default_generator(DeviceIndex(index)); });
  m.def("current", [] { return int(current); });
  m.def("set_current", [](int index) { current = DeviceIndex(index); });
}
