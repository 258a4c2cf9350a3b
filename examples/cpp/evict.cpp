// Calls kvops' operators from C++, without Python: load the library, find the operators in torch's dispatcher, and evict
// three quarters of a KV cache with KeyDiff. For CUDA tensors, load libkvops_cuda.so as well.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <iostream>

using Arguments = std::vector<c10::IValue>;

// The results of an operator, called as in Python: by name, with positional and keyword arguments.
Arguments call(const char* name, Arguments stack, const std::unordered_map<std::string, c10::IValue>& keywords = {}) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  op.schema().checkAndNormalizeInputs(stack, keywords);  // also fills in the defaults
  op.callBoxed(&stack);
  return stack;
}

int main(int argc, char** argv) {
  if (argc != 2 || !dlopen(argv[1], RTLD_NOW)) {
    std::cerr << (argc == 2 ? dlerror() : "usage: evict path/to/libkvops.so") << "\n";
    return 1;
  }
  at::Tensor k = at::randn({1, 8, 4096, 128}, at::kBFloat16), v = at::randn_like(k);  // [batch, KV heads, tokens, head_dim]
  at::Tensor scores = call("kvops::anchor_cosine", {k})[0].toTensor();
  at::Tensor kept = call("kvops::select_topk", {scores}, {{"k", 1024}})[0].toTensor();
  Arguments rows = call("kvops::gather_kv", {k, v, kept});
  std::cout << "K " << k.sizes() << " -> " << rows[0].toTensor().sizes() << "\n";
}
