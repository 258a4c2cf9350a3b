// cudasim_traffic.cpp: counts a kernel's memory traffic. Replaces ThreadSanitizer's runtime, so it is linked with
// objects compiled with -fsanitize=thread, and is itself compiled without it.
//
// The lanes of a warp run one after another until they meet, and each keeps a list of its accesses. Then the n-th
// accesses of all lanes from one place of the source count as one instruction of the warp (a request). Where lanes
// diverge in a loop, this is an approximation.
//
// - Global memory: a request touches 32-byte sectors. Each block has an L1: an LRU cache of its fraction of the
// multiprocessor's 256 KiB minus shared memory, divided by the resident blocks. Loads that hit go no further. Stores,
// atomics, cp.async.cg and __ldcg go to L2.
// - L2 is one LRU cache of sectors. Here blocks run one after another, so their L2 requests are recorded and replayed
// as if all resident blocks ran at once, with 16 sectors from each in turn, and a new block in the place of one that
// ends. Read misses come from DRAM. A written sector goes to DRAM once, when it is evicted or at the end.
// - Shared memory: 32 banks of 4 bytes. 8-byte accesses are processed by half warps, 16-byte ones (also ldmatrix and
// cp.async) by quarter warps. A wavefront serves each bank once; one word for many lanes is a broadcast. Atomics on one
// word count one wavefront per lane.
//
// Kernel parameters, blockIdx and the like, constants and the threads' stacks are registers or constant memory on a
// GPU, and are not counted.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cudasim_access.h"

namespace cudasim {
namespace {

constexpr uint64_t kSector = 32;
constexpr uint64_t kTurn = 16;  // sectors that a block requests before the next block's turn

struct Device {  // the device of cudasim_traffic_begin()
  uint64_t multiprocessors = 132, l2_bytes = 50 << 20;
  uint64_t l1_bytes = 256 << 10, shared_bytes = 228 << 10, threads = 2048;  // per multiprocessor
};

struct Needs {  // a kernel's needs in addition to its launch's
  uint64_t registers = 0, static_bytes = 0;
};

struct Range {
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool has(uintptr_t p) const { return p - begin < bytes; }
};

// An LRU cache of sectors.
class Cache {
 public:
  explicit Cache(uint64_t bytes = 0) : most_(bytes / kSector) { entries_.push_back({0, 0, 0, 0}); }

  // Returns whether the sector was cached, and caches it. A writer (a number above 0) makes it dirty. Calls
  // evicted(writer) when a dirty sector is evicted.
  template <class Evicted>
  bool touch(uint64_t sector, unsigned writer, Evicted evicted) {
    if (most_ == 0) {
      if (writer) evicted(writer);
      return false;
    }
    const auto [it, is_new] = index_.try_emplace(sector, unsigned(entries_.size()));
    if (is_new) {
      if (index_.size() > most_) {
        Entry& oldest = entries_[it->second = entries_[0].before];
        index_.erase(oldest.sector);
        if (oldest.writer) evicted(oldest.writer);
        unlink(oldest);
        oldest.sector = sector, oldest.writer = 0;
      } else {
        entries_.push_back({sector, 0, 0, 0});
      }
    } else {
      unlink(entries_[it->second]);
    }
    Entry& entry = entries_[it->second];
    entry.before = 0, entry.after = entries_[0].after;
    entries_[entry.after].before = entries_[0].after = it->second;
    if (writer) entry.writer = writer;
    return !is_new;
  }

  template <class Evicted>
  void clean(Evicted evicted) {
    for (Entry& entry : entries_)
      if (entry.writer) evicted(entry.writer), entry.writer = 0;
  }

 private:
  struct Entry {
    uint64_t sector;
    unsigned before, after;  // in a ring, from the newest to the oldest; entry 0 closes it
    unsigned writer;
  };
  void unlink(const Entry& x) { entries_[x.before].after = x.after, entries_[x.after].before = x.before; }

  uint64_t most_;
  std::unordered_map<uint64_t, unsigned> index_;
  std::vector<Entry> entries_;
};

enum class Space { Global, Shared };

struct Count {                                               // of one place and kind, or of a launch
  uint64_t requests = 0, bytes = 0, sectors = 0, least = 0;  // least: sectors, or wavefronts, that the bytes would need
  uint64_t l1_hits = 0, wavefronts = 0;

  void add(const Count& x) {
    requests += x.requests, bytes += x.bytes, sectors += x.sectors, least += x.least;
    l1_hits += x.l1_hits, wavefronts += x.wavefronts;
  }
};

struct Event {
  uintptr_t at;
  unsigned place;
  uint8_t bytes;
  Access kind;
  Space space;
  bool past_l1;
};

struct Block {
  std::vector<Range> shared;
  Cache l1;
  std::vector<std::vector<struct Lane*>> warps;
  std::vector<uint64_t>* trace;  // its L2 requests: sector numbers, doubled, odd if written
};

struct Lane {  // a thread of a block, or of the host, which counts nothing
  static constexpr int kMostCalls = 64;
  Block* block = nullptr;
  unsigned rank = 0;
  Range stack;
  int muted = 0, depth = 0;
  bool past_l1 = false;
  struct Call {
    uintptr_t from;
    uint64_t hash;  // of the calls up to this one
  } calls[kMostCalls];
  std::vector<Event> events;

  uint64_t hash() const { return depth ? calls[std::min(depth, kMostCalls) - 1].hash : 0; }
};
Lane host, *current = &host;

using PlaceKey = std::pair<unsigned, unsigned>;  // place, kind and space

struct Launch {
  std::string kernel;
  dim3 grid, block;
  uint64_t dynamic_bytes = 0, shared_bytes = 0, resident = 1;
  std::vector<std::vector<uint64_t>> traces;  // by block
  std::map<PlaceKey, Count> places;
  uint64_t l2_read = 0, l2_written = 0, dram_read = 0, dram_written = 0;  // bytes
};

struct Traffic final : Watcher {
  bool counting = false;
  Device device;
  std::map<std::string, Needs, std::less<>> needs;  // by kernel name, as far as known
  Cache l2;
  std::deque<Launch> launches;
  std::vector<std::vector<uintptr_t>> places;  // return addresses, innermost first
  std::unordered_map<uint64_t, unsigned> place_index;
  std::unordered_map<const void*, std::unique_ptr<Block>> blocks;  // running
  Range library, parameters;

  Traffic() { watcher = this; }

  void begin(const Device& d) {
    device = d, l2 = Cache(d.l2_bytes);
    launches.clear(), places.clear(), place_index.clear();
    counting = true;
  }

  // ---- Events from the simulator -----------------------------------------------------------------------------------
  void launch_begins(std::string_view kernel_name, dim3 grid, dim3 block, size_t dynamic_bytes) override {
    if (!counting) return;
    if (!library.bytes) find_library();
    const char here = 0;
    parameters = {reinterpret_cast<uintptr_t>(&here), 64 << 10};  // launch() has the arguments, not far up the stack
    const uint64_t threads = uint64_t(block.x) * block.y * block.z, count = uint64_t(grid.x) * grid.y * grid.z;
    Launch& launch = launches.emplace_back();
    launch.kernel = plain_name(kernel_name), launch.grid = grid, launch.block = block,
    launch.dynamic_bytes = dynamic_bytes;
    const Needs& kernel = needs[plain_name(kernel_name)];
    const uint64_t warps = (threads + 31) / 32, registers = (kernel.registers + 7) / 8 * 8 * 32 * warps;
    launch.shared_bytes = dynamic_bytes + kernel.static_bytes + 1024;  // CUDA reserves 1024
    launch.resident = std::min({uint64_t{32}, device.threads / threads, device.shared_bytes / launch.shared_bytes,
                                registers ? (64 << 10) / registers : 32,
                                (count + device.multiprocessors - 1) / device.multiprocessors});
    launch.resident = std::max<uint64_t>(launch.resident, 1);
    launch.traces.resize(count);
  }

  // kvops::(anonymous namespace)::gather_kv_kernel<uint4> -> gather_kv_kernel
  static std::string plain_name(std::string_view name) {
    name = name.substr(0, name.find('<'));
    return std::string(name.substr(name.rfind(':') + 1));
  }

  void launch_ends() override {
    if (!counting) return;
    blocks.clear();  // after an error
    replay(launches.back(), unsigned(launches.size()));
  }

  void filled(const void* p, size_t bytes) override {
    if (!counting) return;
    Launch& launch = launches.emplace_back();
    launch.kernel = "memset", launch.grid = launch.block = dim3(1);
    launch.traces.resize(1);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(p);
    for (uint64_t s = begin / kSector; s * kSector < begin + bytes; ++s) launch.traces[0].push_back(2 * s + 1);
    replay(launch, unsigned(launches.size()));
  }

  void block_begins(const void* name, uint64_t index) override {
    if (!counting) return;
    Launch& launch = launches.back();
    const uint64_t shared = launch.shared_bytes * launch.resident;
    const uint64_t threads = launch.block.x * launch.block.y * launch.block.z;
    auto block = std::make_unique<Block>();
    block->l1 = Cache((device.l1_bytes - std::min(device.l1_bytes, shared)) / launch.resident);
    block->warps.assign((threads + 31) / 32, std::vector<Lane*>(32));
    block->trace = &launch.traces[index];
    blocks[name] = std::move(block);
  }

  void has_shared(const void* name, const void* p, size_t bytes) override {
    if (const auto it = blocks.find(name); it != blocks.end())
      it->second->shared.push_back({reinterpret_cast<uintptr_t>(p), bytes});
  }

  void block_ends(const void* name) override {
    const auto it = blocks.find(name);
    if (it == blocks.end()) return;
    for (auto& warp : it->second->warps) settle(warp);
    blocks.erase(it);
  }

  void thread_begins(void* fiber, const void* name, unsigned rank, const void* stack, size_t stack_bytes) override {
    Lane& lane = *static_cast<Lane*>(fiber);
    const auto it = blocks.find(name);
    lane.block = it == blocks.end() ? nullptr : it->second.get();
    lane.rank = rank, lane.stack = {reinterpret_cast<uintptr_t>(stack), stack_bytes};
    lane.depth = 0, lane.past_l1 = false, lane.events.clear();
    if (lane.block) lane.block->warps[rank / 32][rank % 32] = &lane;
  }

  // A meeting of some lanes says nothing about what the others do at that point, unless they have returned.
  void warp_meets(unsigned mask) override {
    if (!current->block) return;
    auto& warp = current->block->warps[current->rank / 32];
    for (int i = 0; i < 32; ++i)
      if (warp[i] && warp[i]->depth >= 0 && !(mask >> i & 1)) return;
    settle(warp);
  }
  void block_meets() override {
    if (!current->block) return;
    for (auto& warp : current->block->warps) settle(warp);
  }
  void thread_ends() override { current->depth = -1; }

  __attribute__((noinline)) void access(Access kind, const void* p, size_t bytes) override {
    note(kind, p, bytes, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
  }
  void past_l1() override { current->past_l1 = true; }
  void hush(int by) override { current->muted += by; }

  // ---- Accesses ----------------------------------------------------------------------------------------------------
  void note(Access kind, const void* p, size_t bytes, uintptr_t from) {
    Lane& lane = *current;
    if (!lane.block || lane.depth < 0) return;
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    if (lane.stack.has(at) || parameters.has(at) || library.has(at)) return;
    Space space = Space::Global;
    for (const auto& [_, block] : blocks)  // all blocks of a cluster
      for (const Range& range : block->shared)
        if (range.has(at)) space = Space::Shared;
    const bool past_l1 = lane.past_l1 || kind != Access::Read;
    lane.past_l1 = false;
    const unsigned place = place_of(lane, from);
    while (bytes) {  // as many instructions as needed
      uint8_t piece = 16;
      while (piece > bytes || at % piece) piece /= 2;
      lane.events.push_back({at, place, piece, kind, space, past_l1});
      at += piece, bytes -= piece;
    }
  }

  unsigned place_of(const Lane& lane, uintptr_t from) {
    const uint64_t key = (lane.hash() ^ from) * 0x9e3779b97f4a7c15u;
    const auto [it, is_new] = place_index.try_emplace(key, unsigned(places.size()));
    if (is_new) {
      auto& frames = places.emplace_back(1, from - library.begin);
      for (int i = std::min(lane.depth, Lane::kMostCalls); i-- > 0;)
        frames.push_back(lane.calls[i].from - library.begin);
    }
    return it->second;
  }

  // Groups what the lanes of a warp have done into instructions.
  void settle(const std::vector<Lane*>& warp) {
    const Lane* first = nullptr;
    bool alike = true;
    for (const Lane* lane : warp) {
      if (!lane || lane->events.empty()) continue;
      if (!first) first = lane;
      alike = alike && std::equal(lane->events.begin(), lane->events.end(), first->events.begin(), first->events.end(),
                                  [](auto& a, auto& b) { return a.place == b.place; });
    }
    if (!first) return;
    Block& block = *first->block;
    Request request;
    if (alike) {
      for (size_t i = 0; i < first->events.size(); ++i) {
        request.clear();
        for (unsigned l = 0; l < 32; ++l)
          if (warp[l] && !warp[l]->events.empty()) request.add(l, warp[l]->events[i]);
        count(block, request);
      }
    } else {  // the n-th from the same place, in order of first occurrence
      std::unordered_map<uint64_t, size_t> index;
      std::deque<Request> requests;
      std::unordered_map<unsigned, unsigned> times;
      for (unsigned l = 0; l < 32; ++l) {
        if (!warp[l]) continue;
        times.clear();
        for (const Event& event : warp[l]->events) {
          const uint64_t key = uint64_t{event.place} << 32 | times[event.place]++;
          const auto [it, is_new] = index.try_emplace(key, requests.size());
          if (is_new) requests.emplace_back();
          requests[it->second].add(l, event);
        }
      }
      for (Request& x : requests) count(block, x);
    }
    for (Lane* lane : warp)
      if (lane) lane->events.clear();
  }

  struct Request {
    std::array<Event, 32> lanes;
    unsigned mask = 0;
    void clear() { mask = 0; }
    void add(unsigned lane, const Event& event) { lanes[lane] = event, mask |= 1u << lane; }
  };

  void count(Block& block, Request& request) {
    for (const Space space : {Space::Global, Space::Shared}) {  // one pointer may reach both, in different lanes
      std::array<const Event*, 32> lanes;
      unsigned size = 0, first = 0;
      for (unsigned l = 0; l < 32; ++l) {
        const bool here = (request.mask >> l & 1) && request.lanes[l].space == space;
        lanes[l] = here ? &request.lanes[l] : nullptr;
        if (here && !size++) first = l;
      }
      if (!size) continue;
      const Event& event = *lanes[first];
      Count& at = launches.back().places[{event.place, unsigned(event.kind) * 2 + unsigned(space)}];
      at.requests++;
      if (space == Space::Shared)
        count_shared(lanes, at);
      else
        count_global(block, lanes, at);
    }
  }

  void count_global(Block& block, const std::array<const Event*, 32>& lanes, Count& at) {
    std::array<uint64_t, 32> starts, sectors;
    unsigned size = 0;
    for (const Event* event : lanes)
      if (event) starts[size] = event->at, sectors[size++] = event->at / kSector;
    const Event& event = **std::find_if(lanes.begin(), lanes.end(), [](auto* x) { return x != nullptr; });
    std::sort(starts.begin(), starts.begin() + size), std::sort(sectors.begin(), sectors.begin() + size);
    const uint64_t bytes = event.bytes * (std::unique(starts.begin(), starts.begin() + size) - starts.begin());
    const unsigned touched = unsigned(std::unique(sectors.begin(), sectors.begin() + size) - sectors.begin());
    at.bytes += bytes, at.sectors += touched, at.least += (bytes + kSector - 1) / kSector;
    const bool reads = event.kind == Access::Read || event.kind == Access::CopyRead || event.kind == Access::Atomic;
    const bool writes = event.kind == Access::Write || event.kind == Access::Atomic;
    for (unsigned i = 0; i < touched; ++i) {
      if (reads && !event.past_l1 && block.l1.touch(sectors[i], 0, [](unsigned) {})) {
        ++at.l1_hits;
        continue;
      }
      if (reads) block.trace->push_back(2 * sectors[i]);
      if (writes) block.trace->push_back(2 * sectors[i] + 1);
    }
  }

  static void count_shared(const std::array<const Event*, 32>& lanes, Count& at) {
    const Event& event = **std::find_if(lanes.begin(), lanes.end(), [](auto* x) { return x != nullptr; });
    const unsigned together = event.bytes > 8 ? 8 : event.bytes > 4 ? 16 : 32;
    for (unsigned group = 0; group < 32; group += together) {
      std::array<uintptr_t, 32> words;
      unsigned size = 0;
      for (unsigned l = group; l < group + together; ++l) {
        if (!lanes[l]) continue;
        const unsigned count = std::max(1, lanes[l]->bytes / 4);
        for (unsigned w = 0; w < count; ++w) words[size++] = lanes[l]->at / 4 + w;
        at.bytes += lanes[l]->bytes;
      }
      if (!size) continue;
      std::sort(words.begin(), words.begin() + size);
      if (event.kind != Access::Atomic)
        size = unsigned(std::unique(words.begin(), words.begin() + size) - words.begin());
      std::array<unsigned, 32> of_bank{};
      for (unsigned i = 0; i < size; ++i) ++of_bank[words[i] % 32];
      at.wavefronts += *std::max_element(of_bank.begin(), of_bank.end());
      ++at.least;
    }
  }

  // ---- L2 ----------------------------------------------------------------------------------------------------------
  void replay(Launch& launch, unsigned number) {
    const auto evicted = [&](unsigned writer) { launches[writer - 1].dram_written += kSector; };
    struct Turn {
      const std::vector<uint64_t>* trace;
      size_t done = 0;
    };
    std::vector<Turn> running;
    size_t next = 0;
    const size_t most = device.multiprocessors * launch.resident;
    const auto start = [&](Turn& turn) {
      while (next < launch.traces.size() && launch.traces[next].empty()) ++next;
      if (next == launch.traces.size()) return false;
      turn = {&launch.traces[next++]};
      return true;
    };
    for (Turn turn; running.size() < most && start(turn);) running.push_back(turn);
    while (!running.empty()) {
      for (Turn& turn : running) {
        for (size_t end = std::min(turn.done + kTurn, turn.trace->size()); turn.done < end; ++turn.done) {
          const uint64_t sector = (*turn.trace)[turn.done] / 2;
          const bool written = (*turn.trace)[turn.done] % 2;
          const bool hit = l2.touch(sector, written ? number : 0, evicted);
          (written ? launch.l2_written : launch.l2_read) += kSector;
          if (!written && !hit) launch.dram_read += kSector;
        }
        if (turn.done == turn.trace->size() && !start(turn)) turn.trace = nullptr;
      }
      std::erase_if(running, [](const Turn& turn) { return !turn.trace; });
    }
    launch.traces.clear();
  }

  void find_library() {
    const auto look = [](dl_phdr_info* info, size_t, void* arg) {
      Range& range = *static_cast<Range*>(arg);
      const uintptr_t here = reinterpret_cast<uintptr_t>(&current);
      uintptr_t end = 0;
      for (int i = 0; i < info->dlpi_phnum; ++i)
        if (info->dlpi_phdr[i].p_type == PT_LOAD)
          end = std::max<uintptr_t>(end, info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
      if (here - info->dlpi_addr >= end) return 0;
      range = {info->dlpi_addr, end};
      return 1;
    };
    dl_iterate_phdr(look, &library);
  }

  // ---- The report, as JSON -----------------------------------------------------------------------------------------
  std::string report() {
    counting = false;
    l2.clean([&](unsigned writer) { launches[writer - 1].dram_written += kSector; });
    std::string text = "{\"places\": [";
    const auto separate = [&] {
      if (text.back() != '[' && text.back() != '{') text += ", ";
    };
    const auto field = [&](const char* name, uint64_t value) {
      separate();
      text += '"', text += name, text += "\": ", text += std::to_string(value);
    };
    for (const auto& frames : places) {
      separate();
      text += '[';
      for (const uintptr_t frame : frames) separate(), text += std::to_string(frame);
      text += ']';
    }
    text += "], \"launches\": [";
    for (const Launch& x : launches) {
      separate();
      text += "{\"kernel\": \"" + x.kernel + '"';
      field("blocks", uint64_t(x.grid.x) * x.grid.y * x.grid.z);
      field("threads", uint64_t(x.block.x) * x.block.y * x.block.z);
      field("dynamic_bytes", x.dynamic_bytes), field("resident", x.resident);
      field("l2_read", x.l2_read), field("l2_written", x.l2_written);
      field("dram_read", x.dram_read), field("dram_written", x.dram_written);
      text += ", \"accesses\": [";
      for (const auto& [key, c] : x.places) {
        static constexpr const char* kinds[] = {"read", "write", "atomic", "copy read", "copy write"};
        separate();
        text += std::string("{\"kind\": \"") + kinds[key.second / 2] +
                "\", \"shared\": " + (key.second % 2 ? "true" : "false");
        field("place", key.first), field("requests", c.requests), field("bytes", c.bytes);
        field("sectors", c.sectors), field("least", c.least), field("l1_hits", c.l1_hits);
        field("wavefronts", c.wavefronts);
        text += '}';
      }
      text += "]}";
    }
    return text + "]}";
  }
};
Traffic traffic;

void on_access(Access kind, const void* p, size_t bytes, uintptr_t from) { traffic.note(kind, p, bytes, from); }
void on_switch(Lane&) {}

}  // namespace
}  // namespace cudasim

// ---- In place of ThreadSanitizer's runtime -----------------------------------------------------------------------
using cudasim::current, cudasim::Lane, cudasim::traffic, cudasim::on_access, cudasim::on_switch;

#include "cudasim_tsan.h"

extern "C" {
void __tsan_func_entry(void* from) {
  Lane& lane = *current;
  if (!lane.block || lane.depth < 0) return;
  const uint64_t hash = lane.hash();
  if (lane.depth++ < Lane::kMostCalls) {
    const uintptr_t caller = reinterpret_cast<uintptr_t>(from);
    lane.calls[lane.depth - 1] = {caller, (hash ^ caller) * 0x9e3779b97f4a7c15u};
  }
}
void __tsan_func_exit() {
  if (current->depth > 0) --current->depth;
}

// ---- For tests ---------------------------------------------------------------------------------------------------
// Starts counting with cold caches, on a GPU with this many multiprocessors and bytes of L2.
__attribute__((visibility("default"))) void cudasim_traffic_begin(uint64_t multiprocessors, uint64_t l2_bytes,
                                                                  uint64_t l1_bytes, uint64_t shared_bytes) {
  traffic.begin({multiprocessors, l2_bytes, l1_bytes, shared_bytes});
}
// A kernel's registers per thread and bytes of static shared memory.
__attribute__((visibility("default"))) void cudasim_traffic_kernel(const char* name, uint64_t registers,
                                                                   uint64_t static_bytes) {
  traffic.needs[name] = {registers, static_bytes};
}
// The counts since then. Valid until the next call.
__attribute__((visibility("default"))) const char* cudasim_traffic_report() {
  static std::string text;
  return (text = traffic.report()).c_str();
}
}
