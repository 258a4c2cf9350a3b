// Communication between blocks of a grid: shared memory within a cluster, flags in global memory.
#pragma once

namespace cudasim {
inline unsigned cluster_rank() { return sim.block->rank; }

inline void cluster_sync(Where at = Where::current()) {
  Quiet quiet;
  Cluster& cluster = *sim.block->cluster;
  if (watcher) watcher->publishes();
  sim.meet(cluster.barrier, sim.threads * unsigned(cluster.blocks.size()), {"cluster_sync", at}, nullptr, true, [] {});
  if (watcher) watcher->refreshes();
}

// Translates p, in this block's dynamic shared memory, to block `rank` of the cluster. Counts as the access itself.
// Other blocks may be accessed after all blocks have started, which the first cluster_sync() guarantees, and until they
// end.
inline void* of_block(const void* p, unsigned rank) {
  Quiet quiet;
  Cluster& cluster = *sim.block->cluster;
  const unsigned char* const begin = sim.block->dynamic_shared.get();
  const size_t offset = static_cast<const unsigned char*>(p) - begin;
  if (rank >= cluster.blocks.size()) sim.fail("of_block of rank " + std::to_string(rank) + ", beyond the cluster");
  if (p < begin || offset >= sim.block->dynamic_bytes) sim.fail("of_block of what is not dynamic shared memory");
  Block& other = cluster.blocks[rank];
  if (&other != sim.block) {
    if (!cluster.barrier.generation) sim.fail("of_block before the first cluster_sync: the other may not have begun");
    if (!other.live) sim.fail("of_block of a block that has returned");
    other.seen_at = cluster.barrier.generation;
  }
  return other.dynamic_shared.get() + offset;
}

// Flags between blocks. A load lets others run first: one of them may be about to store the flag.
inline void store_release(unsigned* flag, unsigned value) {
  sim.preempt();
  if (watcher) watcher->publishes();
  told(Access::Atomic, flag, sizeof *flag);
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  sim.changed();
}
inline unsigned load_acquire(const unsigned* flag, Where at = Where::current()) {
  sim.poll({"load_acquire", at});
  if (watcher) watcher->refreshes();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
}  // namespace cudasim
