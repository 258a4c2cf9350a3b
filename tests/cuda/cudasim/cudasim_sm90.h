// Twins of csrc/cuda/sm90/engine.cuh: wgmma, TMA and mbarriers on the CUDA simulator. Results that must be waited for
// are wrong until then. Each copy and each product completes at once or late, as cudasim::late() decides.
//
// Copies: copy_box() immediately fills the target with poison (0xff, NaN). A late copy lands when a thread waits for
// its mbarrier.
//
// Products: begin_keys() and begin_values() leave NaN in the accumulators. wait_products<n>() completes the oldest
// ones, in order, until n are in flight. A late product reads its operands from shared memory only then. Successive
// products may use the same accumulators. Until a product has been waited for, its weights must stay in their
// registers, and its thread must not arrive at the mbarrier for which the copies into its operands wait.
//
// Stores: wgmma and TMA see what threads have stored in shared memory only after fence_stores(). An operand, or the
// target of a copy, that has changed since is an error. A fence is assumed to cover all threads of the block. Both must
// start at a multiple of 1024 bytes, where the pattern of the swizzle starts. An mbarrier may be used once its thread
// has called barriers_made().
//
// Registers: all warpgroups start with the most that a launch of one block per multiprocessor allows. take_registers()
// waits until others have given enough.
#pragma once

namespace kvops::sm90 {
namespace {

// The Hopper state of a block.
struct Engine {
  struct Copy {
    uint64_t* barrier;
    std::function<void()> land;
  };
  struct Product {
    float* to;
    std::shared_ptr<std::vector<float>>
        sums;                   // the future contents of `to`; products into the same accumulators share it
    std::function<void()> add;  // null once it is done
    cudasim::Site site;
    std::vector<const void*> read;  // where its operands in shared memory start
    const float* weights;           // its operand in registers, or null
    std::vector<float> were;        // what they were when it started
  };

  cudasim::Meeting barriers[16];
  std::vector<std::pair<uint64_t*, cudasim::Fiber*>> waiters;  // for mbarriers
  std::deque<Copy> copies;                                     // in flight
  std::vector<std::deque<Product>> products;                   // in flight, by thread
  unsigned char* shared;                                       // the block's dynamic shared memory
  std::vector<unsigned char> seen;                             // the same as wgmma and TMA see it
  std::map<const uint64_t*, unsigned> raw;                     // mbarriers without barriers_made(), and their threads
  std::vector<uint64_t*> waited;                               // the mbarrier that each thread has waited for last
  std::map<const void*, const uint64_t*> guards;               // by target of a copy: what its thread had waited for
  std::vector<int> registers;                                  // by thread
  int free_registers = 0;
  std::vector<cudasim::Fiber*> takers;  // of registers, waiting

  Engine()
      : products(cudasim::sim.threads),
        shared(cudasim::sim.block->dynamic_shared.get()),
        seen(cudasim::sim.block->dynamic_bytes, 0xff),
        waited(cudasim::sim.threads),
        registers(cudasim::sim.threads, std::min(65536 / static_cast<int>(cudasim::sim.threads) & -8, 256)) {}

  static Engine& get() {
    cudasim::Quiet quiet;
    auto& engine = cudasim::sim.block->engine;
    if (!engine) engine = std::make_shared<Engine>();
    return *static_cast<Engine*>(engine.get());
  }

  void see(const void* from, size_t bytes) {
    cudasim::Quiet quiet;
    std::memcpy(seen.data() + (static_cast<const unsigned char*>(from) - shared), from, bytes);
  }

  // Checks an operand, or the target of a copy.
  void check(const void* operand, size_t bytes, const cudasim::Site& site) const {
    cudasim::Quiet quiet;
    const unsigned char* const begin = static_cast<const unsigned char*>(operand);
    if (reinterpret_cast<uintptr_t>(begin) % 1024) cudasim::sim.fail(site.str() + ": not at a multiple of 1024 bytes");
    if (begin < shared || begin + bytes > shared + seen.size())
      cudasim::sim.fail(site.str() + ": not in dynamic shared memory");
    if (std::memcmp(begin, seen.data() + (begin - shared), bytes))
      cudasim::sim.fail(site.str() + ": threads have stored there, and no fence_stores() since");
  }

  void check(const uint64_t* barrier) const {
    if (raw.contains(barrier)) cudasim::sim.fail("an mbarrier is used, and no barriers_made() since barrier_init()");
  }
};

inline bool same_bits(float a, float b) { return __float_as_uint(a) == __float_as_uint(b); }

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, Half>)
    return {__half_as_ushort(__float2half_rn(x))};
  else
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

template <class T>
void check_operand(const T* operand, int elements, cudasim::Where at) {
  if (threadIdx.x % 32 == 0) Engine::get().check(operand, elements * sizeof(T), {"wgmma", at});
}

// Starts x (+)= what add(sums) adds to its argument. read, weights: its operands, in shared memory and registers.
template <bool kAdd, int n, class Add>
void begin_product(float (&x)[n], cudasim::Where at, std::initializer_list<const void*> read,
                   std::pair<const float*, int> weights, Add add) {
  auto& products = Engine::get().products[cudasim::sim.self->rank];
  std::shared_ptr<std::vector<float>> sums;
  bool late = cudasim::late();
  {
    cudasim::Quiet quiet;
    for (const auto& other : products)
      if (other.to == x) sums = other.sums, late |= other.add != nullptr;  // keep their order
    if (!sums) sums = std::make_shared<std::vector<float>>(x, x + n);
    products.push_back({x,
                        sums,
                        [sums, add] {
                          if (!kAdd) std::fill(sums->begin(), sums->end(), 0.0f);
                          add(sums->data());
                        },
                        {"wgmma", at},
                        read,
                        weights.first,
                        {weights.first, weights.first + weights.second}});
  }
  if (!late) std::exchange(products.back().add, nullptr)();
  std::fill(x, x + n, CUDART_NAN_F);
}

template <int kUnderWay, class... Sums>
void wait_products(Sums&...) {
  cudasim::sim.preempt();
  auto& products = Engine::get().products[cudasim::sim.self->rank];
  while (products.size() > kUnderWay) {
    const Engine::Product product = std::move(products.front());
    {
      cudasim::Quiet quiet;
      products.pop_front();
    }
    if (!std::equal(product.were.begin(), product.were.end(), product.weights, same_bits))
      cudasim::sim.fail(product.site.str() + ": its weights have changed before it was waited for");
    if (product.add) product.add();
    const auto more = std::find_if(products.begin(), products.end(), [&](auto& x) { return x.to == product.to; });
    if (more == products.end()) std::copy(product.sums->begin(), product.sums->end(), product.to);
  }
}

template <class T, int kDim, int kKeys>
void begin_keys(float (&x)[kKeys / 2], const T* q, const T* k, CUDASIM_AT) {
  check_operand(q, kRows * kDim, at);
  check_operand(k, kKeys * kDim, at);
  begin_product<false>(x, at, {q, k}, {}, [q, k, thread = threadIdx.x % 128](float* x) {
    for (int i = 0; i < kKeys / 2; ++i)
      for (int c = 0; c < kDim; ++c)
        x[i] += to_float(q[slab_at(Accumulator::row(thread, i), c, kRows)]) *
                to_float(k[slab_at(Accumulator::column(thread, i), c, kKeys)]);
  });
}

template <class T, int kKeys>
struct Weights {
  float own[kKeys / 2];

  void round(const float (&x)[kKeys / 2]) {
    for (int i = 0; i < kKeys / 2; ++i) own[i] = to_float(rounded<T>(x[i]));
  }
};

template <class T, int kDim, int kKeys>
void begin_values(float (&o)[kDim / 2], const Weights<T, kKeys>& weights, const T* v, CUDASIM_AT) {
  check_operand(v, kKeys * kDim, at);
  struct Rows {
    float of[2][kKeys];  // a thread's two rows, spread over four lanes' registers
  };
  struct {
    const float* weights;
    std::shared_ptr<Rows> rows = std::make_shared<Rows>();
  } mine{weights.own};
  cudasim::sim.meet_warp({"wgmma", at}, ~0u, mine, false, [&](decltype(mine)* const* lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int from = lane / 4 * 4; from < lane / 4 * 4 + 4; ++from)
        for (int i = 0; i < kKeys / 2; ++i)
          lanes[lane]->rows->of[i / 2 % 2][Accumulator::column(from, i)] = lanes[from]->weights[i];
  });
  const std::pair<const float*, int> own{weights.own, kKeys / 2};
  begin_product<true>(o, at, {v}, own, [v, rows = mine.rows, thread = threadIdx.x % 128](float* o) {
    for (int i = 0; i < kDim / 2; ++i)
      for (int j = 0; j < kKeys; ++j)
        o[i] += rows->of[i / 2 % 2][j] * to_float(v[slab_at(j, Accumulator::column(thread, i), kKeys)]);
  });
}

template <class T, int kDim, int kKeys>
void multiply_keys(float (&x)[kKeys / 2], const T* q, const T* k, CUDASIM_AT) {
  begin_keys<T, kDim, kKeys>(x, q, k, at);
  wait_products<0>(x);
}

template <int kRegisters>
void give_registers() {
  cudasim::Quiet quiet;
  Engine& engine = Engine::get();
  int& own = engine.registers[cudasim::sim.self->rank];
  if (kRegisters > own) cudasim::sim.fail("give_registers() of more than the thread has");
  engine.free_registers += own - kRegisters, own = kRegisters;
  for (cudasim::Fiber* taker : std::exchange(engine.takers, {})) cudasim::sim.make_ready(taker);
}
template <int kRegisters>
void take_registers(CUDASIM_AT) {
  cudasim::Quiet quiet;
  Engine& engine = Engine::get();
  int& own = engine.registers[cudasim::sim.self->rank];
  if (kRegisters < own) cudasim::sim.fail("take_registers() of fewer than the thread has");
  while (engine.free_registers < kRegisters - own) {
    engine.takers.push_back(cudasim::sim.self);
    cudasim::sim.self->site = {"take_registers", at};
    cudasim::sim.wait();
  }
  engine.free_registers -= kRegisters - own, own = kRegisters;
}

inline cudasim::Meeting& named_barrier(int id) { return Engine::get().barriers[id]; }
inline void meet(int threads, int id, CUDASIM_AT) {
  cudasim::Quiet quiet;
  cudasim::sim.meet(named_barrier(id), threads, {"bar.sync", at}, nullptr, true, [] {});
}
inline void come_by(int threads, int id) {
  cudasim::Quiet quiet;
  cudasim::sim.come_by(named_barrier(id), threads);
}
inline void fence_stores() {
  Engine& engine = Engine::get();
  engine.see(engine.shared, engine.seen.size());
}
inline void share_stores(int threads, int id, CUDASIM_AT) {
  fence_stores();
  meet(threads, id, at);
}

struct MBarrier {  // stored in the 8 bytes of a real one
  uint8_t expected, pending;
  uint16_t phase;
  int32_t bytes;  // still to arrive

  static MBarrier& at(uint64_t* p) { return *reinterpret_cast<MBarrier*>(p); }
};

inline void barrier_settle(uint64_t* p) {
  cudasim::happens_before(reinterpret_cast<char*>(p));
  MBarrier& barrier = MBarrier::at(p);
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  std::erase_if(Engine::get().waiters, [&](auto& waiter) {
    if (waiter.first == p) cudasim::sim.make_ready(waiter.second);
    return waiter.first == p;
  });
}
inline void barrier_init(uint64_t* p, int arrivals) {
  cudasim::Quiet quiet;
  if (reinterpret_cast<uintptr_t>(p) % 8) cudasim::sim.fail("an mbarrier that is not 8-byte aligned");
  MBarrier::at(p) = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
  Engine::get().raw[p] = cudasim::sim.self->rank;
}
inline void barriers_made() {
  cudasim::Quiet quiet;
  std::erase_if(Engine::get().raw, [](const auto& x) { return x.second == cudasim::sim.self->rank; });
}
inline void barrier_arrive(uint64_t* p) {
  cudasim::Quiet quiet;
  const Engine& engine = Engine::get();
  engine.check(p);
  for (const auto& product : engine.products[cudasim::sim.self->rank]) {
    for (const void* operand : product.read)
      if (const auto guard = engine.guards.find(operand); guard != engine.guards.end() && guard->second == p)
        cudasim::sim.fail("its keys or values are released before it has waited for " + product.site.str());
  }
  if (!MBarrier::at(p).pending) cudasim::sim.fail("more threads arrive at an mbarrier than it was made for");
  --MBarrier::at(p).pending;
  barrier_settle(p);
}
inline void barrier_announce(uint64_t* p, int bytes) {
  {
    cudasim::Quiet quiet;
    MBarrier::at(p).bytes += bytes;
  }
  barrier_arrive(p);
}

// Lands the copies that an mbarrier waits for.
inline void land_copies(uint64_t* p) {
  auto& copies = Engine::get().copies;
  std::vector<std::function<void()>> own;
  {
    cudasim::Quiet quiet;
    for (const auto& copy : copies)
      if (copy.barrier == p) own.push_back(copy.land);
    std::erase_if(copies, [&](auto& copy) { return copy.barrier == p; });
    cudasim::happens_after(reinterpret_cast<char*>(p));
  }
  for (const auto& land : own) land();
}
inline void barrier_wait(uint64_t* p, unsigned phase, CUDASIM_AT) {
  const auto over = [&] {
    cudasim::Quiet quiet;
    return MBarrier::at(p).phase % 2 != phase;
  };
  {
    cudasim::Quiet quiet;
    Engine::get().check(p);
    Engine::get().waited[cudasim::sim.self->rank] = p;
  }
  while (!over()) {
    land_copies(p);
    if (over()) break;
    cudasim::Quiet quiet;
    Engine::get().waiters.emplace_back(p, cudasim::sim.self);
    cudasim::sim.self->site = {"mbarrier.try_wait", at};
    cudasim::sim.wait();
  }
  cudasim::happens_after(reinterpret_cast<char*>(p));
}

struct TensorMap {
  const char* data;
  uint64_t strides[3];
  int64_t n;
  int keys;
};

template <class T>
bool tensor_map(TensorMap& map, const KVView& x, int64_t b, int64_t heads, int64_t n, int keys) {
  map = {x.data, {}, n, keys};
  return copy_strides(map.strides, x, b, heads, n);
}

template <class T>
void copy_box(const TensorMap& map, uint64_t* barrier, T* to, int column, int key, int head, int batch, CUDASIM_AT) {
  Engine& engine = Engine::get();
  const size_t bytes = map.keys * kSlab * sizeof(T);
  {
    cudasim::Quiet quiet;
    engine.check(to, bytes, {"TMA copy", at});
    engine.check(barrier);
    if (const uint64_t* guard = engine.waited[cudasim::sim.self->rank]) engine.guards[to] = guard;
  }
  std::memset(to, 0xff, bytes);
  engine.see(to, bytes);
  const auto land = [=, &engine] {
    const char* const from = map.data + batch * map.strides[2] + head * map.strides[1] + column * sizeof(T);
    for (int j = 0; j < map.keys; ++j)
      for (int c = 0; c < kSlab; ++c)
        to[slab_at(j, c, map.keys)] =
            key + j < map.n ? reinterpret_cast<const T*>(from + (key + j) * map.strides[0])[c] : T{};
    engine.see(to, bytes);
    cudasim::Quiet quiet;
    MBarrier::at(barrier).bytes -= static_cast<int>(bytes);
    if (MBarrier::at(barrier).bytes < 0) cudasim::sim.fail("more bytes arrive at an mbarrier than were announced");
    barrier_settle(barrier);
  };
  if (!cudasim::late()) return land();
  cudasim::Quiet quiet;
  cudasim::happens_before(reinterpret_cast<char*>(barrier));
  engine.copies.push_back({barrier, land});
  const auto waiter =
      std::find_if(engine.waiters.begin(), engine.waiters.end(), [&](auto& x) { return x.first == barrier; });
  if (waiter == engine.waiters.end()) return;
  cudasim::sim.make_ready(waiter->second);  // the waiting thread lands it
  engine.waiters.erase(waiter);
}

inline unsigned char* aligned_shared() {
  unsigned char* const bytes = cudasim::sim.block->dynamic_shared.get();
  return bytes + (-reinterpret_cast<uintptr_t>(bytes) & 1023);
}

inline bool is_hopper() {
  const std::string_view name = cudasim::device().name;
  return name == "hopper" || name == "h200";
}

}  // namespace
}  // namespace kvops::sm90
