// __shared__ variables: each block has its own copies, allocated separately on the heap, so that sanitizers see their
// bounds.
//
// They are declared thread_local, with the TLS model in which the compiler calls __tls_get_addr() for each address. We
// define that function. The sizes come from the library's symbol table.
#pragma once

#define __shared__ thread_local __attribute__((tls_model("global-dynamic")))

namespace cudasim {

struct Asked {  // the argument that the compiler passes for a thread_local variable
  size_t module, offset;
};

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<unsigned char, FreeMemory>;

inline Memory shared_memory(size_t bytes) {  // filled with 0xff: NaN, or -1
  void* p = nullptr;
  if (posix_memalign(&p, 128, std::max<size_t>(bytes, 1))) throw std::bad_alloc();
  return Memory(static_cast<unsigned char*>(std::memset(p, 0xff, bytes)));
}

struct Variables {  // this library's __shared__ variables
  size_t module = 0;
  std::vector<size_t> sizes;      // by number
  std::vector<uint16_t> numbers;  // by offset
  bool finding = false;           // while probe() finds the module

  static __attribute__((noipa)) void* probe() {
    __shared__ char variable;
    return &variable;
  }

  void find() {
    if (module) return;
    finding = true, probe(), finding = false;
    Dl_info library;
    if (!module || !dladdr(this, &library)) throw Error("cudasim: the compiler does not call __tls_get_addr()");
    std::ifstream file(library.dli_fname, std::ios::binary);
    const auto read = [&](uint64_t at, auto* to, size_t count) {
      file.seekg(std::streamoff(at)).read(reinterpret_cast<char*>(to), std::streamsize(count * sizeof *to));
    };
    ElfW(Ehdr) head{};
    read(0, &head, 1);
    std::vector<ElfW(Shdr)> sections(head.e_shnum);
    read(head.e_shoff, sections.data(), sections.size());
    for (const auto& section : sections) {
      if (section.sh_type != SHT_SYMTAB) continue;
      std::vector<ElfW(Sym)> symbols(section.sh_size / sizeof(ElfW(Sym)));
      read(section.sh_offset, symbols.data(), symbols.size());
      for (const auto& symbol : symbols) {
        if (ELF64_ST_TYPE(symbol.st_info) != STT_TLS || !symbol.st_shndx) continue;
        numbers.resize(std::max(numbers.size(), symbol.st_value + 1), uint16_t(-1));
        numbers[symbol.st_value] = uint16_t(sizes.size());
        sizes.push_back(symbol.st_size);
      }
    }
    if (!file || sizes.empty()) throw Error(std::string("cudasim: no symbols in ") + library.dli_fname);
  }
};
inline Variables variables;
}  // namespace cudasim
